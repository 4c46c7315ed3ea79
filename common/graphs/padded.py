"""A forward's rows, padded to one of a few sizes, as captured execution takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.batch import ForwardBatch

FILL_KV_LEN = 1
"""Keys that a padding row sees: its own, at physical position 0, which belongs to no request."""


SMALL_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24)
ROW_STEP = 16


def padded_rows(rows: int) -> int:
    """The size of the step that computes so many rows: one of SMALL_ROWS or a multiple of ROW_STEP."""

    for size in SMALL_ROWS:
        if rows <= size:
            return size
    return -(-rows // ROW_STEP) * ROW_STEP


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A view of a `ForwardBatch`, which stays as it is. raw_rows: rows that are real and come first.

    ids, positions, write_slots: int64 [rows]. key_starts: int64 [rows], where a row's path starts in
    key_slots: int64 [keys], physical token positions by logical position. kv_lens: int64 [rows], keys that a
    row sees; kv_len_sum: their sum, padding rows included.
    """

    raw_rows: int
    ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    key_starts: torch.Tensor
    key_slots: torch.Tensor
    kv_lens: torch.Tensor
    kv_len_sum: int

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @classmethod
    def of(cls, batch: ForwardBatch, rows: int) -> PaddedBatch:
        """Raises ValueError for fewer rows than the batch has, for a row that stands in no attention
        segment, and for a row behind the keys of its path."""

        raw = batch.ids.shape[0]
        if rows < raw:
            raise ValueError(f"{raw} rows do not fit a step of {rows}; choose a larger one or split them")
        key_starts = torch.full((raw,), -1, dtype=torch.int64)
        ends = torch.zeros(raw, dtype=torch.int64)
        first = 1  # padding rows look at the zero in front
        for segment in batch.segments:
            paths, keys = segment.key_slots.shape
            starts = torch.arange(first, first + paths * keys, keys).view(-1, 1).expand_as(segment.rows)
            key_starts[segment.rows] = starts
            ends[segment.rows] = keys
            first += paths * keys
        kv_lens = batch.positions + 1
        if raw and int(key_starts.min()) < 0:
            missing = torch.nonzero(key_starts < 0).flatten().tolist()
            raise ValueError(f"rows {missing[:8]} stand in no attention segment")
        if raw and bool((kv_lens > ends).any()):
            row = int(torch.nonzero(kv_lens > ends)[0])
            raise ValueError(f"row {row} at position {int(kv_lens[row]) - 1} has only {int(ends[row])} keys")
        padding = (0, rows - raw)
        return cls(
            raw_rows=raw,
            ids=F.pad(batch.ids, padding),
            positions=F.pad(batch.positions, padding, value=FILL_KV_LEN - 1),
            write_slots=F.pad(batch.write_slots, padding),
            key_starts=F.pad(key_starts, padding),
            key_slots=torch.cat([batch.ids.new_zeros(1), *(s.key_slots.flatten() for s in batch.segments)]),
            kv_lens=F.pad(kv_lens, padding, value=FILL_KV_LEN),
            kv_len_sum=int(kv_lens.sum()) + (rows - raw) * FILL_KV_LEN,
        )
