"""Files in the shared-memory directory: their names, their locks, their mappings."""

import fcntl
import mmap
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

DEFAULT_DIRECTORY = Path("/dev/shm")

_NAME = re.compile(r"paceline-([a-z]{1,16})-([0-9]{1,10})-([0-9a-f]{16})-([a-z0-9_]{1,32})")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """`paceline-<service>-<pid>-<incarnation, 16 hex digits>-<label>`.

    The pid is for people who look into the directory: across containers it says nothing about life, the
    owner's lock on the file does.
    """

    service: str
    pid: int
    incarnation: int
    label: str

    def __str__(self) -> str:
        return f"paceline-{self.service}-{self.pid}-{self.incarnation:016x}-{self.label}"


def parse_segment_name(name: str) -> SegmentName | None:
    """None for a file that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    service, pid, incarnation, label = match.groups()
    return SegmentName(service, int(pid), int(incarnation, 16), label)


def wait_for_lock(fd: int) -> None:
    """Take the lock that says that the segment's owner lives; a cleaner may hold it for a moment.

    The kernel drops it with the owner's last descriptor, however the owner ends, so a reused pid cannot
    keep a dead segment alive nor a live one be taken for dead.
    """
    fcntl.flock(fd, fcntl.LOCK_EX)


def take_lock_of_the_dead(fd: int) -> bool:
    """False if the owner lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def owner_is_alive(fd: int) -> bool:
    """Whether the process that made the segment still holds its lock. fd: opened by the asker itself."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def still_named(fd: int, path: Path) -> bool:
    """Whether path still leads to the open file; another process may have removed or replaced it."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def map_read_only(fd: int, size: int) -> torch.Tensor:
    """uint8 [size] whose pages the OS refuses to write: a store through it ends the process by SIGSEGV."""
    with warnings.catch_warnings():
        # torch warns that it cannot express a read-only tensor; that the OS enforces it is the point.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), dtype=torch.uint8)


def map_writable(fd: int, size: int) -> torch.Tensor:
    """uint8 [size]. The mapping lives as long as any tensor over it."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, protection), dtype=torch.uint8)


def tensor_at(base: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of base (uint8 [bytes]) as a contiguous tensor of dtype and shape, starting at byte offset."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return base[offset : offset + count].view(dtype).view(shape)
