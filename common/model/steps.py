"""The decoder layers as one call over a forward's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from common.attention.backend import AttentionBackend
from common.attention.kv_cache import KvCache
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layers import DecoderLayer
from common.model.rope import RopeTable


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Where a forward's captured rows go: the residual stream that enters the layers, side by side, row i of
    the forward at row i. A layer may stand there more than once.

    rows: contiguous [padded rows or more, len(layers) × hidden or more], in the model's dtype. Padding rows
    of the forward are written too; what is more than that is left as it is.
    """

    layers: tuple[int, ...]
    rows: torch.Tensor

    def check(self, residual: torch.Tensor) -> None:
        """Raises ValueError unless the rows of a forward with this residual stream, [padded rows, hidden],
        have room."""

        count, hidden = residual.shape
        fits = (
            self.rows.dim() == 2
            and self.rows.is_contiguous()
            and self.rows.dtype == residual.dtype
            and self.rows.shape[0] >= count
            and self.rows.shape[1] >= len(self.layers) * hidden
            and self.rows.shape[1] % hidden == 0
        )
        if not fits:
            raise ValueError(
                f"captured rows go to {self.rows.dtype} {list(self.rows.shape)}; {count} rows of "
                f"{len(self.layers)} layers need {residual.dtype} {[count, len(self.layers) * hidden]}"
            )

    def write(self, layer: int, entering: torch.Tensor) -> None:
        """entering: [rows, hidden], what enters this layer."""

        hidden = entering.shape[1]
        for place, captured in enumerate(self.layers):
            if captured == layer:
                self.rows[: len(entering), place * hidden : (place + 1) * hidden] = entering


class Steps(Protocol):
    """A row's bits do not depend on the rows beside it. numerics: names the kernels, for the numeric plan."""

    numerics: str

    def run(self, batch: ForwardBatch, cache: KvCache, capture: CapturedRows | None = None) -> torch.Tensor:
        """Writes the rows' KV and what is captured. Returns the residual stream after the last layer, [rows,
        hidden]. Raises ValueError, before anything is written, for segments that break the contract of
        `AttentionSegment` and for captured rows without room."""
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

    def run(self, batch: ForwardBatch, cache: KvCache, capture: CapturedRows | None = None) -> torch.Tensor:
        planned = self._attention.plan(batch)
        rope = self._rope.rows(batch.positions, self._config.heads, self._config.kv_heads)
        x = self._embedding.index_select(0, batch.ids)
        if capture is not None:
            capture.check(x)
        for index, layer in enumerate(self._layers):
            if capture is not None:
                capture.write(index, x)
            x = layer(x, rope, planned, cache, index, batch.write_slots)
        return x
