"""The parts of a decoder layer. Activations are [rows, …] of the model's dtype; rows never mix outside
attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.attention.backend import PlannedAttention
from common.attention.kv_cache import KvCache
from common.model.linear import Linear
from common.model.rope import RopeRows


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root-mean-square norm over the last dimension, computed in float32. weight: [size]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head (Qwen3)."""

    query: RmsNorm
    key: RmsNorm

    def __call__(self, heads: torch.Tensor, query_heads: int) -> torch.Tensor:
        """heads: [rows, heads + kv_heads, head_dim], queries first."""
        return torch.cat([self.query(heads[:, :query_heads]), self.key(heads[:, query_heads:])], dim=1)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """qkv: queries, keys and values in one weight, in this order. head_norms: None where the family has
    none."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv: Linear
    output: Linear
    head_norms: HeadNorms | None

    def __call__(
        self,
        x: torch.Tensor,
        rope: RopeRows,
        planned: PlannedAttention,
        cache: KvCache,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        rows = x.shape[0]
        qkv = self.qkv(x).view(rows, self.heads + 2 * self.kv_heads, self.head_dim)
        heads = qkv[:, : self.heads + self.kv_heads]
        if self.head_norms is not None:
            heads = self.head_norms(heads, self.heads)
        heads = rope.rotate(heads, x.dtype)
        cache.write(layer, slots, heads[:, self.heads :], qkv[:, self.heads + self.kv_heads :])
        return self.output(planned.attend(heads[:, : self.heads], cache.keys[layer], cache.values[layer]))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) · up(x)). gate_up: both in one weight, gate first."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu_float32(gate).mul_(up).to(x.dtype))


def silu_float32(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(−x)) in float32, in memory of its own.

    torch's own silu gives the elements of a vector register and those behind the last full one different
    bits.
    """

    wide = x.float()
    return torch.div(wide, torch.neg(wide).exp_().add_(1.0))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(
        self,
        x: torch.Tensor,
        rope: RopeRows,
        planned: PlannedAttention,
        cache: KvCache,
        layer: int,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """x: residual stream [rows, hidden]."""

        x = x + self.attention(self.attention_norm(x), rope, planned, cache, layer, slots)
        return x + self.mlp(self.mlp_norm(x))
