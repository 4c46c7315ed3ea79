"""Mapping what another process shares, after checking every claim of its manifest against the segment."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch

from common.memory.arena import TensorSpec
from common.memory.handle import (
    DTYPES,
    CudaIpcStorage,
    HandleError,
    ManifestEntry,
    MemoryManifest,
    PeerAccess,
    ShmStorage,
    check,
)
from common.memory.mapping import map_read_only, map_writable, tensor_at
from common.memory.segment import (
    DEFAULT_DIRECTORY,
    owner_is_alive,
    parse_segment_name,
)


class Attachment:
    """The tensors of one manifest. Those with access "read" cannot be written: the OS forbids it."""

    def __init__(self, incarnation: int, tensors: dict[str, torch.Tensor]) -> None:
        self.incarnation = incarnation
        self.tensors = tensors

    def detach(self) -> None:
        """Let go of the memory. Idempotent. It is unmapped with the last tensor that was taken out."""
        self.tensors = {}


def attach(
    manifest: MemoryManifest,
    expected: Mapping[str, TensorSpec] | None = None,
    *,
    directory: Path = DEFAULT_DIRECTORY,
) -> Attachment:
    """Check the manifest, its segments and, if given, that it holds the expected tensors; then map them.

    expected: tensors that must be there with this dtype and shape; others may be there too.
    Raises HandleError, naming the tensor; nothing stays mapped then.
    """
    check(manifest)
    _check_expected(manifest, expected or {})
    bases: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    for entry in manifest.entries:
        storage = entry.tensor.storage
        if isinstance(storage, CudaIpcStorage):
            raise HandleError(
                f"tensor {entry.tensor.name!r} lies on GPU {storage.device_uuid[:64]!r}; "
                "this process maps shared memory only: run both services on a CPU"
            )
        base = bases.get(storage.path)
        if base is None:
            base = bases[storage.path] = _map_segment(entry, storage, manifest.incarnation, directory)
        dtype = DTYPES[entry.tensor.dtype]
        tensors[entry.tensor.name] = tensor_at(base, entry.tensor.offset, dtype, entry.tensor.shape)
    return Attachment(manifest.incarnation, tensors)


def _check_expected(manifest: MemoryManifest, expected: Mapping[str, TensorSpec]) -> None:
    offered = {entry.tensor.name: entry.tensor for entry in manifest.entries}
    for name, spec in expected.items():
        tensor = offered.get(name)
        if tensor is None:
            raise HandleError(f"tensor {name!r} is expected and not in the manifest")
        if DTYPES[tensor.dtype] != spec.dtype or tensor.shape != spec.shape:
            raise HandleError(
                f"tensor {name!r} is {tensor.dtype} {tensor.shape}, expected {spec.dtype} {spec.shape}"
            )


def _map_segment(
    entry: ManifestEntry, storage: ShmStorage, incarnation: int, directory: Path
) -> torch.Tensor:
    label = f"tensor {entry.tensor.name!r}"
    path = Path(storage.path)
    segment = parse_segment_name(path.name)
    if storage.path != str(directory / path.name) or segment is None:
        raise HandleError(f"{label}: {storage.path[:200]!r} is no segment in {directory}")
    if segment.incarnation != incarnation:
        raise HandleError(
            f"{label}: segment {path.name} belongs to incarnation {segment.incarnation:016x}, "
            f"the manifest to {incarnation:016x}"
        )
    fd = _open(path, entry.access, label)
    try:
        _check_segment(fd, storage, label)
        return map_writable(fd, storage.size) if entry.access == "write" else map_read_only(fd, storage.size)
    except OSError as error:
        raise HandleError(f"{label}: segment {path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


def _open(path: Path, access: PeerAccess, label: str) -> int:
    mode = os.O_RDWR if access == "write" else os.O_RDONLY
    try:
        # O_NONBLOCK keeps a FIFO of that name from blocking the open until a writer comes.
        return os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HandleError(f"{label}: segment {path} cannot be opened: {error.strerror}") from error


def _check_segment(fd: int, storage: ShmStorage, label: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise HandleError(f"{label}: segment {storage.path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise HandleError(
            f"{label}: segment {storage.path} belongs to uid {status.st_uid}, ours is {os.geteuid()}; "
            "run all services as one user"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise HandleError(
            f"{label}: segment {storage.path} has mode {stat.S_IMODE(status.st_mode):04o}, not 0600"
        )
    if status.st_size != storage.size:
        raise HandleError(
            f"{label}: segment {storage.path} has {status.st_size} bytes, its handle says {storage.size}"
        )
    if not owner_is_alive(fd):
        raise HandleError(f"{label}: the owner of segment {storage.path} is gone")
