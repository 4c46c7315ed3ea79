"""Segments as tensors: the mappings of a file in the shared-memory directory."""

import mmap
import warnings

import torch


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
