"""Memory that a process allocates once and shares: one file, planned as a set of named tensors."""

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from common.memory.handle import (
    ALIGNMENT_BYTES,
    DTYPE_NAMES,
    MANIFEST_VERSION,
    ManifestEntry,
    MemoryManifest,
    PeerAccess,
    ShmStorage,
    TensorHandle,
    check,
    row_major_strides,
    tensor_bytes,
)
from common.memory.mapping import map_writable, tensor_at
from common.memory.segment import (
    DEFAULT_DIRECTORY,
    SegmentName,
    parse_segment_name,
    still_named,
    wait_for_lock,
)


class ArenaError(Exception):
    """Shared memory that cannot be had; the message names the directory, the bytes and the remedy."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype: one of `common.memory.handle.DTYPES`. shape: at least one dimension, each at least 1."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def arena_bytes(tensors: Mapping[str, TensorSpec]) -> int:
    """Size of the file that holds these tensors."""
    return sum(_aligned(spec.size_bytes) for spec in tensors.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """A file in the shared-memory directory, owned by this process and removed with it.

    tensors: the planned tensors over one mapping, zero at first, each 64-byte aligned.
    """

    def __init__(self, path: Path, fd: int, access: PeerAccess, specs: Mapping[str, TensorSpec]) -> None:
        self.path = path
        self.size_bytes = os.fstat(fd).st_size
        self.access = access
        self.tensors: dict[str, torch.Tensor] = {}
        self.entries: tuple[ManifestEntry, ...] = ()
        self._fd: int | None = fd
        self._map(specs)

    def _map(self, specs: Mapping[str, TensorSpec]) -> None:
        assert self._fd is not None
        base = map_writable(self._fd, self.size_bytes)
        storage = ShmStorage(str(self.path), self.size_bytes)
        entries: list[ManifestEntry] = []
        offset = 0
        for name, spec in specs.items():
            strides = row_major_strides(spec.shape)
            handle = TensorHandle(name, DTYPE_NAMES[spec.dtype], spec.shape, strides, offset, storage)
            entries.append(ManifestEntry(handle, self.access))
            self.tensors[name] = tensor_at(base, offset, spec.dtype, spec.shape)
            offset += _aligned(spec.size_bytes)
        self.entries = tuple(entries)

    @classmethod
    def create(
        cls,
        *,
        service: str,
        incarnation: int,
        label: str,
        tensors: Mapping[str, TensorSpec],
        access: PeerAccess,
        directory: Path = DEFAULT_DIRECTORY,
    ) -> "Arena":
        """Reserve the memory and map it.

        access: what a process that attaches may do with all of it; tensors that differ need an arena each.
        label: tells the arenas of a process apart. Raises ArenaError if the plan is wrong, the directory
        cannot be used or has too little room, HandleError if a tensor cannot be described by a handle.
        """
        name = SegmentName(service, os.getpid(), incarnation, label)
        if parse_segment_name(str(name)) != name:
            raise ArenaError(f"arena name {str(name)!r} does not have the form of a shared-memory segment")
        _check_plan(tensors)
        if not directory.is_absolute():
            raise ArenaError(f"shared-memory directory {str(directory)!r} is not absolute")
        path = directory / str(name)
        fd = _create_locked(path)
        try:
            _reserve(fd, path, arena_bytes(tensors))
            arena = cls(path, fd, access, tensors)
            check(MemoryManifest(MANIFEST_VERSION, incarnation, arena.entries))
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return arena

    def close(self) -> None:
        """Remove the file and give up its lock. Idempotent.

        Tensors that were taken out stay valid: the memory goes with the last of them, here and in peers.
        """
        if self._fd is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._fd)
        self._fd = None
        self.tensors = {}

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def manifest_of(incarnation: int, *arenas: Arena) -> MemoryManifest:
    """What a peer needs to attach these arenas of one process. Raises HandleError if names collide."""
    entries = tuple(entry for arena in arenas for entry in arena.entries)
    manifest = MemoryManifest(MANIFEST_VERSION, incarnation, entries)
    check(manifest)
    return manifest


def _check_plan(tensors: Mapping[str, TensorSpec]) -> None:
    if not tensors:
        raise ArenaError("an arena needs at least one tensor")
    for name, spec in tensors.items():
        if spec.dtype not in DTYPE_NAMES:
            raise ArenaError(
                f"tensor {name!r}: {spec.dtype} cannot be shared, only {', '.join(DTYPE_NAMES.values())}"
            )
        if not spec.shape or min(spec.shape) < 1:
            raise ArenaError(f"tensor {name!r}: shape {spec.shape} holds nothing")


def _create_locked(path: Path) -> int:
    # Between creation and lock a cleaner may take the new file for a dead one and remove it: then try again.
    for _ in range(8):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ArenaError(f"{path} exists already; close the arena of that label first") from None
        except OSError as error:
            raise ArenaError(
                f"shared-memory directory {path.parent} cannot be written: {error.strerror}; "
                "make it writable or set another one"
            ) from error
        wait_for_lock(fd)
        if still_named(fd, path):
            return fd
        os.close(fd)
    raise ArenaError(
        f"{path} is removed by another process each time it is made; give every service its own directory"
    )


def _reserve(fd: int, path: Path, size: int) -> None:
    # Without the reservation a full tmpfs would show up later, as SIGBUS at the first touch of a page.
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
            raise ArenaError(f"{path}: reserving {size} bytes failed: {error.strerror}") from error
        stat = os.statvfs(path.parent)
        raise ArenaError(
            f"shared-memory directory {path.parent} is too small: {path.name} needs {size} bytes, "
            f"{stat.f_bavail * stat.f_frsize} are free ({error.strerror}). "
            "Give the directory a larger tmpfs, lower the KV memory, or set another shared-memory directory"
        ) from error
