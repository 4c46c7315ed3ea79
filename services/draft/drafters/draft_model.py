"""A standalone draft model of the target's vocabulary, with its KV in the pages that both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.attention.kv_cache import KvCache, kv_bytes_per_position
from common.attention.segments import build_batch
from common.kv.lengths import pages_for
from common.model.llama import LlamaModel
from common.sampling.sampler import sample
from services.draft.drafters.base import SharedState
from services.draft.work import DraftRow, Drafts, DraftWork, Tree

EXTEND_ROWS = 256
"""Committed tokens that one work catches up on; a slot further behind proposes nothing yet."""
MAX_K = 32


@dataclass(slots=True)
class _Lane:
    """A slot's drafter state. ids: what the KV at positions 0, 1, … was computed for."""

    key: tuple[int, int]
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Extend:
    """ids at positions start, start + 1, … get KV."""

    pages: Sequence[int]
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Step:
    """One token at position base − 1, whose logits are wanted."""

    pages: Sequence[int]
    base: int
    tokens: Sequence[int]
    parents: Sequence[int] = (-1,)


@dataclass(slots=True)
class _Chain:
    """A slot that drafts in this work. drafted: tokens so far."""

    row: DraftRow
    lane: _Lane
    pages: list[int]
    limit: int
    drafted: list[int] = field(default_factory=list)

    @property
    def going_on(self) -> bool:
        return len(self.drafted) < self.limit


class DraftModelDrafter:
    """Chains, each token chosen with the noise that the target will use at its position."""

    max_k = MAX_K
    capture: tuple[int, ...] = ()
    hidden_row_bytes = 0

    def __init__(self, name: str, model: LlamaModel, vocab_size: int, tokenizer: str) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.kv_bytes_per_position = kv_bytes_per_position(model.config, model.dtype)
        self._model = model
        self._shared: SharedState | None = None
        self._cache: KvCache | None = None
        self._lanes: dict[int, _Lane] = {}

    def attach(self, shared: SharedState) -> None:
        self.detach()
        positions = shared.pages * shared.page_size
        self._cache = KvCache.over(shared.kv, self._model.config, positions, self._model.dtype)
        self._shared = shared

    def detach(self) -> None:
        self._lanes.clear()
        self._cache = None
        self._shared = None

    def draft(self, work: DraftWork) -> Drafts:
        for slot in work.released:
            self._lanes.pop(slot, None)
        chains = self._extend(work.rows)
        while going_on := [chain for chain in chains if chain.going_on]:
            self._step(going_on)
        return Drafts(
            tuple(
                Tree(
                    chain.row.slot, (chain.row.ids[-1], *chain.drafted), tuple(range(-1, len(chain.drafted)))
                )
                for chain in chains
                if chain.drafted
            )
        )

    def _extend(self, rows: Sequence[DraftRow]) -> list[_Chain]:
        """Catch up on what was committed; the chains of slots that are up to date, with their first token."""
        budget = EXTEND_ROWS
        extends: list[_Extend] = []
        steps: list[_Step] = []
        chains: list[_Chain] = []
        for row in rows:
            lane = self._lane(row)
            pages, limit = self._room(row)
            start = min(len(lane.ids), len(row.ids) - 1)
            end = min(len(row.ids) - 1, start + budget, self._model.max_positions, row.allocated)
            del lane.ids[start:]
            if end > start:
                extends.append(_Extend(pages, start, row.ids[start:end]))
                lane.ids.extend(row.ids[start:end])
                budget -= end - start
            if end == len(row.ids) - 1 and limit > 0:
                steps.append(_Step(pages, len(row.ids), row.ids[-1:]))
                chains.append(_Chain(row, lane, pages, limit))
        self._forward(extends, steps, chains)
        return chains

    def _step(self, chains: Sequence[_Chain]) -> None:
        steps = [
            _Step(chain.pages, len(chain.row.ids) + len(chain.drafted), chain.drafted[-1:])
            for chain in chains
        ]
        self._forward([], steps, chains)

    def _forward(self, extends: Sequence[_Extend], steps: Sequence[_Step], chains: Sequence[_Chain]) -> None:
        """One forward; every step's chain gets its next token."""
        if not extends and not steps:
            return
        assert self._shared is not None
        assert self._cache is not None
        batch = build_batch(extends, steps, self._shared.page_size)
        logits = self._model.forward(batch, self._cache).numpy()[:, : self.vocab_size]
        for chain, step, row in zip(chains, steps, logits, strict=True):
            chain.lane.ids.extend(step.tokens)
            chain.drafted.append(sample(row, chain.row.sampling, step.base))

    def _lane(self, row: DraftRow) -> _Lane:
        """The slot's state, cut back to what its KV holds of this log."""
        lane = self._lanes.get(row.slot)
        if lane is None or lane.key != row.key:
            lane = self._lanes[row.slot] = _Lane(row.key)
        del lane.ids[row.invalid_from :]
        for position, (held, committed) in enumerate(zip(lane.ids, row.ids, strict=False)):
            if held != committed:
                del lane.ids[position:]
                break
        del lane.ids[len(row.ids) :]
        return lane

    def _room(self, row: DraftRow) -> tuple[list[int], int]:
        """The slot's pages, and how many tokens may be drafted: token j needs position committed − 2 + j."""
        assert self._shared is not None
        count = pages_for(row.allocated, self._shared.page_size)
        pages = self._shared.page_table[row.slot, :count].tolist()
        reach = min(row.allocated, self._model.max_positions)
        return pages, max(0, min(row.k, reach - (len(row.ids) - 1)))
