"""One forward's rows, as the model sees them: no lengths of any owner, only this call's own tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Paths that attend over keys gathered in logical order; keys are summed in fixed blocks of 64.

    rows: int64 [paths, queries], indices into the forward's rows. A row may stand in several paths (a shared
    ancestor of a tree): every copy gets the same bits. Padding repeats a row of the same path.
    key_slots: int64 [paths, keys], keys a multiple of 64: physical token positions (page × page_size +
    offset) by logical position; padding is 0.
    A query at logical position p sees keys 0 … p of its path.
    """

    rows: torch.Tensor
    key_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """ids, positions (logical), write_slots (physical token position of the row's KV): int64 [rows].
    logit_rows: int64 [n], rows whose logits are wanted; empty computes none."""

    ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    segments: tuple[AttentionSegment, ...]
    logit_rows: torch.Tensor
