"""KV memory of one model: keys and values by flat physical token position."""

from __future__ import annotations

import torch

from common.kernels.huge_pages import HugePages
from common.model.config import ModelConfig


def kv_bytes_per_position(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one position over all layers."""

    return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize


class KvCache:
    """keys, values: [layers, positions, kv_heads, head_dim], contiguous.

    A physical position (slot index into dimension 1) is page × page_size + offset. Nothing here knows which
    positions are written: readers are told by their attention segments.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.shape != values.shape or keys.dtype != values.dtype or keys.dim() != 4:
            raise ValueError(
                f"keys are {keys.dtype} {list(keys.shape)}, values {values.dtype} {list(values.shape)};"
                " both must be"
                " [layers, positions, kv_heads, head_dim] of one dtype"
            )
        if not keys.is_contiguous() or not values.is_contiguous():
            raise ValueError("keys and values must be contiguous")
        self.keys = keys
        self.values = values

    @classmethod
    def allocate(cls, config: ModelConfig, positions: int, dtype: torch.dtype) -> KvCache:
        """Zeroed memory of its own."""

        size = positions * kv_bytes_per_position(config, dtype)
        return cls.over(HugePages().allocate(size), config, positions, dtype)

    @classmethod
    def over(cls, buffer: torch.Tensor, config: ModelConfig, positions: int, dtype: torch.dtype) -> KvCache:
        """Over memory that exists: uint8 [positions × kv_bytes_per_position], keys first. Raises ValueError
        for another size."""

        needed = positions * kv_bytes_per_position(config, dtype)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() != needed:
            raise ValueError(
                f"KV buffer is {buffer.dtype} {list(buffer.shape)}; {positions} positions need uint8"
                f" [{needed}]"
            )
        shape = (2, config.layers, positions, config.kv_heads, config.head_dim)
        keys, values = buffer.view(dtype).view(shape)
        return cls(keys, values)

    @property
    def positions(self) -> int:
        return self.keys.shape[1]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """slots: int64 [rows], physical positions. keys, values: [rows, kv_heads, head_dim]."""

        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies physical positions source[i] → target[i] (int64 [n], targets distinct) in every layer, as
        if all were read before any is written."""

        self.keys.index_copy_(1, target, self.keys.index_select(1, source))
        self.values.index_copy_(1, target, self.values.index_select(1, source))
