"""The proof, before the first round, that both processes see the same bytes."""

import hashlib

import torch


def pattern(nonce: int, size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes] that no stale memory holds by chance. nonce is taken modulo 2**64."""
    key = (nonce % (1 << 64)).to_bytes(8, "little")
    return torch.frombuffer(bytearray(hashlib.shake_256(key).digest(size_bytes)), dtype=torch.uint8)


def write_pattern(view: torch.Tensor, nonce: int) -> None:
    """Fill view (uint8 [n]) with pattern(nonce)."""
    view.copy_(pattern(nonce, view.numel()))


def has_pattern(view: torch.Tensor, nonce: int) -> bool:
    """Whether view (uint8 [n]) holds pattern(nonce)."""
    return torch.equal(view, pattern(nonce, view.numel()))
