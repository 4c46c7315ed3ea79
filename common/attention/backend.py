"""What a decoder asks of attention."""

from __future__ import annotations

from typing import Protocol

import torch

from common.model.batch import ForwardBatch


class PlannedAttention(Protocol):
    """Attention of one forward's rows; used once per layer."""

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """queries: [rows, heads, head_dim], rotated and scaled. keys, values: one layer's memory in which
        this forward's rows are written, [positions, kv_heads, head_dim]. Returns [rows, heads × head_dim]."""
        ...


class AttentionBackend(Protocol):
    """A row's result is a bitwise function of its query and of keys and values 0 … position in logical order:
    the rows beside it, other paths, padding, physical places and unwritten memory have no part in it."""

    def plan(self, batch: ForwardBatch) -> PlannedAttention:
        """Everything about the batch that all layers share. Raises ValueError for segments that break the
        contract of `AttentionSegment`."""
        ...
