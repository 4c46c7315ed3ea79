"""Files in the shared-memory directory: names and locks, without torch, as a supervisor removes them."""

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

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
