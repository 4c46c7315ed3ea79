"""The EAGLE-3 drafter: a head of one layer that reads the target's states from shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.kv_cache import KvCache
from common.model.eagle3 import Eagle3Head
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from services.draft.drafters.base import HiddenStates, SharedState
from services.draft.eagle.attention import DecodeAttention, ExtendAttention, ExtendPlan
from services.draft.eagle.entries import Entries, Lane
from services.draft.eagle.forward import EagleForward
from services.draft.eagle.growth import Shape, grow
from services.draft.eagle.ranking import Ranking
from services.draft.work import DraftRow, Drafts, DraftWork, HiddenRows, Tree

MAX_K = 32
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Span:
    """Entries at positions start … start + count − 1 that rows of a block give their states to."""

    row: DraftRow
    lane: Lane
    hidden: HiddenRows
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class _Attached:
    """What lasts as long as one attachment. outputs: bf16 [slots, hidden], of each slot's newest entry."""

    hidden: HiddenStates
    entries: Entries
    forward: EagleForward
    outputs: torch.Tensor


class Eagle3Drafter:
    """Trees, or chains with a width of 1. layers: the target's layers that the head reads. positions: longest
    log that is drafted for."""

    max_k = MAX_K

    def __init__(
        self,
        name: str,
        config: Eagle3Config,
        weights: Eagle3Weights,
        *,
        layers: Sequence[int],
        vocab_size: int,
        tokenizer: str,
        positions: int,
        shape: Shape,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.capture = tuple(layers)
        self.hidden_row_bytes = config.aux_size * DTYPE.itemsize
        self.kv_bytes_per_position = 2 * config.kv_heads * config.head_dim * DTYPE.itemsize
        self._config = config
        self._weights = weights
        self._positions = positions
        self._shape = shape
        self._attached: _Attached | None = None

    def attach(self, shared: SharedState) -> None:
        self.detach()
        config, hidden = self._config, shared.hidden
        assert hidden is not None
        embedding = hidden.embedding[: config.vocab_size]
        reach = self._positions + max(self._shape.depth, MAX_K)
        head = Eagle3Head(config, self._weights, dtype=DTYPE, embedding=embedding, max_positions=reach)
        places = shared.pages * shared.page_size
        keys, values = shared.kv.view(DTYPE).view(2, 1, places, config.kv_heads, config.head_dim)
        slots = shared.page_table.shape[0]
        self._attached = _Attached(
            hidden,
            Entries(shared.page_table, shared.page_size),
            EagleForward(head, KvCache(keys, values), ExtendAttention(), DecodeAttention()),
            torch.zeros(slots, config.hidden_size, dtype=DTYPE),
        )

    def detach(self) -> None:
        self._attached = None

    def draft(self, work: DraftWork) -> Drafts:
        """Extends over every row's hidden states, then drafts for the rows whose bonus token has an entry."""
        attached = self._attached
        assert attached is not None
        for slot in work.released:
            attached.entries.release(slot)
        faults: list[str] = []
        self._extend(attached, work.rows, faults)
        lanes = {row.slot: attached.entries.lane_of(row.slot) for row in work.rows}
        growing = [row for row in work.rows if row.k > 0 and lanes[row.slot].reach == len(row.ids) - 1]
        trees = self._grow(attached, growing) if growing else ()
        for row in work.rows:
            attached.entries.remember(row.slot, lanes[row.slot], row.ids)
        return Drafts(trees, tuple(faults))

    # Extend

    def _extend(self, attached: _Attached, rows: Sequence[DraftRow], faults: list[str]) -> None:
        spans = [span for row in rows for span in self._spans(attached, row, faults)]
        spans, features = self._fused(attached, spans, faults)
        if features is None:
            return
        ids = [token for span in spans for token in span.row.ids[span.start : span.start + span.count]]
        for span in spans:
            attached.entries.wrote(span.row.slot, span.lane, span.start, span.start + span.count)
        # A slot's spans follow one another: the last one ends with its newest entry.
        ends = {span.row.slot: sum(one.count for one in spans[: at + 1]) for at, span in enumerate(spans)}
        slots = torch.tensor(list(ends))
        plan = self._plan(attached, spans, slots, torch.tensor(list(ends.values())) - 1)
        attached.outputs[slots] = attached.forward.extend(
            features, torch.tensor(ids, dtype=torch.int64), plan
        )

    def _spans(self, attached: _Attached, row: DraftRow, faults: list[str]) -> list[_Span]:
        """What of a row's hidden states has a place and an id. Entry p reads the state of p − 1."""
        lane = attached.entries.lane(row.slot, row.key, row.ids, row.invalid_from)
        limit = min(len(row.ids), row.allocated, self._positions)
        blocks, block_rows, _ = attached.hidden.rows.shape
        spans = []
        for hidden in row.hidden:
            start = hidden.start + 1
            count = min(hidden.count, limit - start)
            inside = 0 <= hidden.block < blocks and 0 <= hidden.first <= block_rows - hidden.count
            if hidden.start < 0 or not inside:
                faults.append("truncated")
            elif count > 0:
                spans.append(_Span(row, lane, hidden, start, count))
        return spans

    def _fused(
        self, attached: _Attached, spans: list[_Span], faults: list[str]
    ) -> tuple[list[_Span], torch.Tensor | None]:
        """Features of the spans whose block held the rows of its round and numbers alone. The states are
        read once, and nothing keeps them."""
        hidden = attached.hidden
        kept: list[_Span] = []
        states: list[torch.Tensor] = []
        for span in spans:
            first, tag = span.hidden.first, hidden.tags[span.hidden.block]
            fresh = int(tag) == span.hidden.round
            rows = hidden.rows[span.hidden.block, first : first + span.count].clone() if fresh else None
            if rows is None or int(tag) != span.hidden.round:
                faults.append("stale")
            elif not bool(rows.sum(dtype=torch.float32).isfinite()):
                faults.append("poisoned")
            else:
                kept.append(span)
                states.append(rows)
        if not kept:
            return [], None
        together = states[0] if len(states) == 1 else torch.cat(states)
        return kept, attached.forward.fuse(together)

    def _plan(
        self, attached: _Attached, spans: Sequence[_Span], slots: torch.Tensor, last: torch.Tensor
    ) -> ExtendPlan:
        """slots: int64, that have spans. last: int64, the row of each one's newest entry."""
        entries = attached.entries
        places = entries.slots_of(slots, max(span.start + span.count for span in spans))
        valid = entries.valid.index_select(0, slots)[:, : places.shape[1]]
        order = {slot: index for index, slot in enumerate(slots.tolist())}
        owner = torch.tensor([order[span.row.slot] for span in spans])
        lengths = torch.tensor([span.count for span in spans])
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        write_slots = places[owner.repeat_interleave(lengths), positions]
        return ExtendPlan(write_slots, positions - 1, last, places.where(valid, 0), valid)

    # Draft

    def _grow(self, attached: _Attached, rows: Sequence[DraftRow]) -> tuple[Tree, ...]:
        forward, entries, shape = attached.forward, attached.entries, self._shape
        slots = torch.tensor([row.slot for row in rows])
        bases = [len(row.ids) for row in rows]
        nodes = [row.k for row in rows]
        places = entries.slots_of(slots, max(bases))
        valid = entries.valid.index_select(0, slots)[:, : places.shape[1]]
        expanded = shape.width * (shape.levels(max(nodes)) - 1)
        plan = forward.plan_steps(places.where(valid, 0), valid, expanded)
        trees = grow(
            forward,
            plan,
            attached.outputs.index_select(0, slots),
            torch.tensor(bases),
            Ranking([row.sampling for row in rows], bases, forward.target_ids),
            nodes,
            shape,
        )
        return tuple(
            Tree(row.slot, (row.ids[-1], *tokens), (-1, *parents))
            for row, (tokens, parents) in zip(rows, trees, strict=True)
            if tokens
        )
