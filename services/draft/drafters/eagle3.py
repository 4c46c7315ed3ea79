"""The EAGLE-3 drafter: a head of one layer that reads the target's states from shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from common.attention.kv_cache import KvCache
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from services.draft.drafters.base import HiddenStates, SharedState
from services.draft.eagle.attention import ExtendPlan
from services.draft.eagle.bound import bound_forward
from services.draft.eagle.compiled import CompiledForward
from services.draft.eagle.entries import Entries, Lane, Run
from services.draft.eagle.forward import HeadForward
from services.draft.eagle.growth import Shape, grow
from services.draft.eagle.ranking import Ranking
from services.draft.work import DraftRow, Drafts, DraftWork, HiddenRows, Tree

MAX_K = 32
PATIENCE = 32
"""Entries that wait for the next draft, or for more, while nothing is to be drafted: extending over a few
rows reads all of the head's weights."""
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Span:
    """Entries with their ids, and the rows of a block that hold their states."""

    run: Run
    ids: tuple[int, ...]
    hidden: HiddenRows


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Entries to be: their ids, and a copy of the states that they read, bf16 [entries, states]."""

    run: Run
    ids: tuple[int, ...]
    states: torch.Tensor

    def before(self, position: int) -> _Waiting:
        """Those at lower positions."""
        count = max(0, min(self.run.count, position - self.run.start))
        run = replace(self.run, count=count)
        return _Waiting(run, self.ids[:count], self.states[:count])


@dataclass(slots=True)
class _Attached:
    """What lasts as long as one attachment. outputs: bf16 [slots, hidden], of each slot's newest entry.
    waiting: by slot, in the order of positions."""

    hidden: HiddenStates
    entries: Entries
    forward: HeadForward[Any]
    outputs: torch.Tensor
    waiting: dict[int, list[_Waiting]] = field(default_factory=dict)


class Eagle3Drafter:
    """Trees, or chains with a width of 1. layers: the target's layers that the head reads. positions: longest
    log that is drafted for. patience: entries that may wait while nothing is to be drafted."""

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
        patience: int = PATIENCE,
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
        self._patience = patience
        self._attached: _Attached | None = None

    def attach(self, shared: SharedState) -> None:
        self.detach()
        config, hidden = self._config, shared.hidden
        assert hidden is not None
        embedding = hidden.embedding[: config.vocab_size]
        reach = self._positions + max(self._shape.depth, MAX_K)
        places = shared.pages * shared.page_size
        keys, values = shared.kv.view(DTYPE).view(2, 1, places, config.kv_heads, config.head_dim)
        slots = shared.page_table.shape[0]
        self._attached = _Attached(
            hidden,
            Entries(shared.page_table, shared.page_size),
            bound_forward(config, self._weights, embedding, reach, KvCache(keys, values)),
            torch.zeros(slots, config.hidden_size, dtype=DTYPE),
        )

    def detach(self) -> None:
        self._attached = None

    def draft(self, work: DraftWork) -> Drafts:
        """Takes every row's hidden states, and extends over them at the latest when there is something to
        draft; then drafts for the rows whose bonus token has an entry."""
        attached = self._attached
        assert attached is not None
        for slot in work.released:
            attached.entries.release(slot)
            attached.waiting.pop(slot, None)
        faults: list[str] = []
        self._take(attached, work.rows, faults)
        count = sum(one.run.count for row in work.rows for one in attached.waiting[row.slot])
        if count > self._patience or (count and any(row.k > 0 for row in work.rows)):
            self._extend(attached, work.rows)
        lanes = {row.slot: attached.entries.lane_of(row.slot) for row in work.rows}
        growing = [row for row in work.rows if row.k > 0 and 0 < lanes[row.slot].reach == len(row.ids) - 1]
        trees = self._grow(attached, growing) if growing else ()
        for row in work.rows:
            attached.entries.remember(row.slot, lanes[row.slot], row.ids)
        return Drafts(trees, tuple(faults))

    # Extend

    def _take(self, attached: _Attached, rows: Sequence[DraftRow], faults: list[str]) -> None:
        """What the rows' blocks hold waits from now on; what waited for ids not committed is gone."""
        spans = []
        for row in rows:
            lane = attached.entries.lane(row.slot, row.key, row.ids, row.invalid_from)
            waiting = attached.waiting.pop(row.slot, [])
            kept = [one.before(row.invalid_from) for one in waiting if one.run.lane is lane]
            attached.waiting[row.slot] = [one for one in kept if one.run.count]
            spans += self._spans(attached, row, lane, faults)
        spans, states = _read(attached.hidden, spans, faults)
        for span, rows_of_span in zip(spans, states, strict=True):
            attached.waiting[span.run.slot].append(_Waiting(span.run, span.ids, rows_of_span))

    def _extend(self, attached: _Attached, rows: Sequence[DraftRow]) -> None:
        """Entries for all that waits for the rows' slots."""
        runs, ids, features = _fused(attached, [row.slot for row in rows])
        entries = attached.entries
        write_slots, positions = entries.write(runs)
        # A slot's runs follow one another: the row before the next slot's first is its newest entry.
        ends = {run.slot: end for run, end in zip(runs, accumulate(run.count for run in runs), strict=True)}
        last = torch.tensor(list(ends.values())) - 1
        plan = ExtendPlan(write_slots, positions - 1, last, entries.of(list(ends)))
        outputs = attached.forward.extend(features, ids, plan)
        attached.outputs.index_copy_(0, torch.tensor(list(ends)), outputs)

    def _spans(self, attached: _Attached, row: DraftRow, lane: Lane, faults: list[str]) -> list[_Span]:
        """What of a row's hidden states has a place and an id. Entry p reads the state of p − 1."""
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
                ids = row.ids[start : start + count]
                spans.append(_Span(Run(row.slot, lane, start, count), ids, hidden))
        return spans

    # Draft

    def _grow(self, attached: _Attached, rows: Sequence[DraftRow]) -> tuple[Tree, ...]:
        forward, shape = attached.forward, self._shape
        slots = [row.slot for row in rows]
        bases = [len(row.ids) for row in rows]
        nodes = [row.k for row in rows]
        places = attached.entries.of(slots)
        outputs = attached.outputs.index_select(0, torch.tensor(slots))
        ranking = Ranking([row.sampling for row in rows], bases, forward.target_ids)
        if ranking.is_greedy and isinstance(forward, CompiledForward):
            trees = forward.grow(outputs, bases, nodes, places, shape)
        else:
            plan = forward.plan_steps(places, shape.expanded(max(nodes)))
            trees = grow(forward, plan, outputs, bases, ranking, nodes, shape)
        return tuple(
            Tree(row.slot, (row.ids[-1], *tokens), (-1, *parents))
            for row, (tokens, parents) in zip(rows, trees, strict=True)
            if tokens
        )


def _read(
    hidden: HiddenStates, spans: list[_Span], faults: list[str]
) -> tuple[list[_Span], Sequence[torch.Tensor]]:
    """The spans whose block held the rows of its round, and numbers alone, and a copy of their rows. Blocks
    are read once, and nothing keeps them."""
    spans = _without(spans, _stale(spans, hidden.tags), "stale", faults)
    if not spans:
        return [], ()
    states = _states(spans, hidden.rows)
    bad, fault = _stale(spans, hidden.tags), "stale"
    if not bad:
        bad, fault = _poisoned(spans, states), "poisoned"
    if bad:
        return _read(hidden, _without(spans, bad, fault, faults), faults)
    return spans, torch.split(states, [len(span.ids) for span in spans])


def _fused(attached: _Attached, slots: Sequence[int]) -> tuple[list[Run], torch.Tensor, torch.Tensor]:
    """What waits for the slots, and does so no longer: runs; int64 [entries], their ids; their features.
    Nothing keeps the states."""
    ones = [one for slot in slots for one in attached.waiting.pop(slot)]
    ids = torch.tensor([token for one in ones for token in one.ids])
    return [one.run for one in ones], ids, attached.forward.fuse(torch.cat([one.states for one in ones]))


def _stale(spans: Sequence[_Span], tags: torch.Tensor) -> list[_Span]:
    """Spans whose block does not hold the rows of its round (any longer)."""
    now = tags.tolist()
    return [span for span in spans if now[span.hidden.block] != span.hidden.round]


def _poisoned(spans: Sequence[_Span], states: torch.Tensor) -> list[_Span]:
    """Spans with a state that is no finite number."""
    if states.sum(dtype=torch.float32).isfinite():
        return []
    parts = torch.split(states, [len(span.ids) for span in spans])
    return [span for span, part in zip(spans, parts, strict=True) if not bool(part.isfinite().all())]


def _without(spans: list[_Span], bad: Sequence[_Span], fault: str, faults: list[str]) -> list[_Span]:
    faults.extend([fault] * len(bad))
    return [span for span in spans if span not in bad] if bad else spans


def _states(spans: Sequence[_Span], rows: torch.Tensor) -> torch.Tensor:
    """A copy of the spans' rows, one after the other. rows: [blocks, rows, states]."""
    return torch.cat(
        [rows[span.hidden.block, span.hidden.first : span.hidden.first + len(span.ids)] for span in spans]
    )
