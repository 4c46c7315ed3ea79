"""Tensors as small messages: what a process shares, described by bytes and integers only."""

import itertools
import math
import re
from typing import Literal

import msgspec
import torch

MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 20
MAX_ENTRIES = 1024
MAX_DIMS = 8
ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load

# bool is left out on purpose: a peer's byte that is neither 0 nor 1 would be undefined behaviour.
DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TENSOR_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")

PeerAccess = Literal["read", "write"]


class HandleError(Exception):
    """A handle or manifest that does not describe memory that may be mapped; the message names the entry."""


class ShmStorage(msgspec.Struct, frozen=True, array_like=True, tag="shm"):
    """A file in the shared-memory directory. path: absolute. size: bytes of the whole file."""

    path: str
    size: int


class CudaIpcStorage(msgspec.Struct, frozen=True, array_like=True, tag="cuda_ipc"):
    """An allocation on a GPU. handle: the 64 bytes of cudaIpcMemHandle_t. allocation_size: bytes.
    offset: bytes from the start of the allocation to the storage's first byte."""

    device_uuid: str
    handle: bytes
    allocation_size: int
    offset: int


class TensorHandle(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. dtype: a key of DTYPES. strides: in elements, row-major. offset: bytes from the storage's
    start, a multiple of 64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: ShmStorage | CudaIpcStorage


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor and what the process that attaches it may do. One storage has one kind of access."""

    tensor: TensorHandle
    access: PeerAccess


class MemoryManifest(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one run of a process shares. incarnation: of the owner, 1 … 2**64 − 1."""

    version: int
    incarnation: int
    entries: tuple[ManifestEntry, ...]


_decoder = msgspec.msgpack.Decoder(MemoryManifest)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def tensor_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype.itemsize


def encode(manifest: MemoryManifest) -> bytes:
    """msgpack. Raises HandleError for a manifest that `decode` would refuse."""
    check(manifest)
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes) -> MemoryManifest:
    """Raises HandleError for anything but a consistent manifest. `attach` checks the real segments."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise HandleError(f"manifest has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}")
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise HandleError(f"manifest is not a msgpack MemoryManifest: {error}") from error
    check(manifest)
    return manifest


def check(manifest: MemoryManifest) -> None:
    """Everything about a manifest that can be checked without its segments. Raises HandleError."""
    if manifest.version != MANIFEST_VERSION:
        raise HandleError(
            f"manifest has version {manifest.version}, this process reads {MANIFEST_VERSION}; "
            "run the same version of all services"
        )
    if not 0 < manifest.incarnation < 1 << 64:
        raise HandleError(f"manifest incarnation {manifest.incarnation} is outside 1 … 2**64 − 1")
    if len(manifest.entries) > MAX_ENTRIES:
        raise HandleError(f"manifest has {len(manifest.entries)} entries, the limit is {MAX_ENTRIES}")
    names: set[str] = set()
    for entry in manifest.entries:
        _check_handle(entry.tensor)
        if entry.tensor.name in names:
            raise HandleError(f"tensor {entry.tensor.name!r} stands twice in the manifest")
        names.add(entry.tensor.name)
    _check_storages(manifest.entries)


def _check_handle(tensor: TensorHandle) -> None:
    if not TENSOR_NAME.fullmatch(tensor.name):
        raise HandleError(f"tensor name {tensor.name[:80]!r} does not match {TENSOR_NAME.pattern}")
    label = f"tensor {tensor.name!r}"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise HandleError(f"{label}: dtype {tensor.dtype[:40]!r} is not one of {', '.join(DTYPES)}")
    if not 1 <= len(tensor.shape) <= MAX_DIMS or len(tensor.strides) != len(tensor.shape):
        raise HandleError(
            f"{label}: {len(tensor.shape)} dimensions and {len(tensor.strides)} strides; "
            f"both must be the same number from 1 to {MAX_DIMS}"
        )
    if min(tensor.shape) < 1:
        raise HandleError(f"{label}: shape {tensor.shape} has a dimension below 1")
    if tensor.strides != row_major_strides(tensor.shape):
        raise HandleError(
            f"{label}: strides {tensor.strides} are not the row-major ones of shape {tensor.shape}, "
            f"{row_major_strides(tensor.shape)}"
        )
    if tensor.offset < 0 or tensor.offset % ALIGNMENT_BYTES:
        raise HandleError(f"{label}: offset {tensor.offset} is not a multiple of {ALIGNMENT_BYTES}")
    capacity = _capacity(tensor.storage, label)
    end = tensor.offset + tensor_bytes(dtype, tensor.shape)
    if end > capacity:
        raise HandleError(f"{label}: ends at byte {end} of a storage of {capacity} bytes")


def _capacity(storage: ShmStorage | CudaIpcStorage, label: str) -> int:
    if isinstance(storage, ShmStorage):
        return storage.size
    if len(storage.handle) != 64:
        raise HandleError(f"{label}: a CUDA IPC handle has 64 bytes, not {len(storage.handle)}")
    if not 0 <= storage.offset <= storage.allocation_size:
        raise HandleError(
            f"{label}: offset {storage.offset} in an allocation of {storage.allocation_size} bytes"
        )
    return storage.allocation_size - storage.offset


def _check_storages(entries: tuple[ManifestEntry, ...]) -> None:
    first: dict[str | bytes, ManifestEntry] = {}
    spans: dict[str | bytes, list[tuple[int, int, str]]] = {}
    for entry in entries:
        tensor, storage = entry.tensor, entry.tensor.storage
        key = storage.path if isinstance(storage, ShmStorage) else storage.handle
        known = first.setdefault(key, entry)
        if known.tensor.storage != storage:
            raise HandleError(
                f"tensors {known.tensor.name!r} and {tensor.name!r} describe one storage differently: "
                f"{known.tensor.storage} and {storage}"
            )
        if known.access != entry.access:
            raise HandleError(
                f"tensors {known.tensor.name!r} and {tensor.name!r} share a storage but not their access "
                f"({known.access} and {entry.access}); give them an arena each"
            )
        end = tensor.offset + tensor_bytes(DTYPES[tensor.dtype], tensor.shape)
        spans.setdefault(key, []).append((tensor.offset, end, tensor.name))
    for intervals in spans.values():
        intervals.sort()
        for (_, end, name), (start, _, after) in itertools.pairwise(intervals):
            if start < end:
                raise HandleError(f"tensors {name!r} and {after!r} overlap: byte {start} is below {end}")
