"""Rotary position embedding (Su et al., 2021) from a table, in the half-rotation layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.model.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Factors of one forward's rows for every head, queries first: float32 [rows, heads + kv_heads,
    head_dim].

    The softmax scale stands in the queries' factors. sin is negated in the first half of a head.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """heads: [rows, heads + kv_heads, head_dim]; products and sum in float32, each rounded by itself, so
        that no element's bits depend on where it lies."""

        wide = heads.float()
        swapped = wide.roll(heads.shape[-1] // 2, dims=-1)
        return wide.mul(self.cos).add_(swapped.mul_(self.sin)).to(dtype)


class RopeTable:
    """cos, sin: of positions 0 … max_positions − 1, float32 [max_positions, head_dim]. sin is negated in the
    first half of a head."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
        if rope.divisors:
            frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
        # Angles in float32 as everywhere in the field; their cos and sin correctly rounded.
        angles = (torch.arange(max_positions).float()[:, None] * frequencies).double()
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).float()
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).float()

    def rows(self, positions: torch.Tensor, heads: int, kv_heads: int) -> RopeRows:
        """positions: int64 [rows]."""

        return RopeRows(
            _for_heads(self.cos.index_select(0, positions), heads, kv_heads),
            _for_heads(self.sin.index_select(0, positions), heads, kv_heads),
        )


def _for_heads(factors: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    rows, head_dim = factors.shape
    scaled = (factors * head_dim**-0.5).unsqueeze(1).expand(rows, heads, head_dim)
    return torch.cat([scaled, factors.unsqueeze(1).expand(rows, kv_heads, head_dim)], dim=1)
