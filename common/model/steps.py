"""The decoder layers as one call over a forward's rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from common.attention.backend import AttentionBackend
from common.attention.kv_cache import KvCache
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layers import DecoderLayer
from common.model.rope import RopeTable


class Steps(Protocol):
    """A row's bits do not depend on the rows beside it. numerics: names the kernels, for the numeric plan."""

    numerics: str

    def run(
        self, batch: ForwardBatch, cache: KvCache, capture: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Writes the rows' KV. Returns the residual stream after the last layer and on entering the layers of
        capture, [rows, hidden] each. Raises ValueError, before anything is written, for segments that break
        the contract of `AttentionSegment`."""
        ...


class EagerSteps:
    """Plain torch operations, for any dtype and any machine. embedding: [vocab, hidden]."""

    numerics = "torch-bf16-blocks-of-64"

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        rope: RopeTable,
        attention: AttentionBackend,
    ) -> None:
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._rope = rope
        self._attention = attention

    def run(
        self, batch: ForwardBatch, cache: KvCache, capture: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        planned = self._attention.plan(batch)
        rope = self._rope.rows(batch.positions, self._config.heads, self._config.kv_heads)
        x = self._embedding.index_select(0, batch.ids)
        entering: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in capture:
                entering[index] = x
            x = layer(x, rope, planned, cache, index, batch.write_slots)
        return x, entering
