"""Which entries of the head's KV may be read. An entry at position p reads the target's state of p − 1 and id
p, so it depends on ids up to p alone; position 0 has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from common.kv.prefix_cache import Chain, extend_chain


@dataclass(slots=True)
class Lane:
    """A slot's entries. key: (request, generation). reach: position of the newest entry, whose output is
    kept; 0 for none. end: no entry at a position from here on. chain: names of the leading pages that are
    remembered."""

    key: tuple[int, int]
    reach: int = 0
    end: int = 0
    chain: Chain = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """Entries at positions start … start + count − 1 of a slot."""

    slot: int
    lane: Lane
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where several slots' entries are that may be read; holes are left out. known: int64 [entries], physical
    positions, slot by slot. counts: int64 [slots], how many each has."""

    known: torch.Tensor
    counts: torch.Tensor

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As a rectangle: int64 [slots, longest], 0 behind a slot's last one, and bool, true up to it.
        Physical position 0 belongs to no slot, so that what unwritten memory holds cannot spoil a sum."""
        by_slot = list(torch.split(self.known, self.counts.tolist()))
        rows = torch.nn.utils.rnn.pad_sequence(by_slot, batch_first=True)
        return rows, torch.arange(rows.shape[1]) < self.counts.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Known:
    """What a page holds. name: as in `common.kv.prefix_cache`. valid: bool [page_size]."""

    name: bytes
    valid: torch.Tensor


class Entries:
    """Validity by slot and position. What is not valid stays a hole: attention masks it.

    page_table: int32 [slots, pages per slot], shared with the target. valid: bool [slots, positions].

    A page is remembered by the ids that its entries were computed for until entries of other ids are written
    to it. So a slot whose leading pages were found in the target's prefix cache finds the entries in them
    too, and pages that hold something else are holes, whatever the target has given them out for in between.
    """

    def __init__(self, page_table: torch.Tensor, page_size: int) -> None:
        slots, width = page_table.shape
        self.page_table = page_table
        self.page_size = page_size
        self.positions = width * page_size
        self.valid = torch.zeros(slots, self.positions, dtype=torch.bool)
        self._pages = page_table.numpy()
        self._valid = self.valid.numpy()
        self._lanes: dict[int, Lane] = {}
        self._known: dict[int, _Known] = {}

    def release(self, slot: int) -> None:
        self._lanes.pop(slot, None)

    def lane(self, slot: int, key: tuple[int, int], ids: Sequence[int], invalid_from: int) -> Lane:
        """The slot's lane for this log, with entries at positions ≥ invalid_from dropped. 0 is said of a log
        that nothing is known of yet, or no longer: what its pages are remembered for still stands."""
        lane = self._lanes.get(slot)
        if lane is None or lane.key != key or invalid_from == 0:
            lane = self._lanes[slot] = Lane(key)
            self.valid[slot] = False
            self._find(slot, lane, ids)
        elif lane.end > invalid_from:
            self.valid[slot, invalid_from : lane.end] = False
            lane.reach = lane.reach if lane.reach < invalid_from else 0
            lane.end = invalid_from
            del lane.chain[invalid_from // self.page_size :]
        return lane

    def lane_of(self, slot: int) -> Lane:
        return self._lanes[slot]

    def of(self, slots: Sequence[int]) -> Places:
        """Every valid entry of the slots."""
        known = [self._physical(slot, np.flatnonzero(self._valid[slot])) for slot in slots]
        counts = torch.tensor([len(one) for one in known])
        return Places(torch.from_numpy(np.concatenate(known)), counts)

    def write(self, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
        """The runs' entries come into place. Their physical and their logical positions, one after the other:
        both int64 [entries]."""
        physical, logical = [], []
        for run in runs:
            positions = np.arange(run.start, run.start + run.count)
            physical.append(self._physical(run.slot, positions))
            logical.append(positions)
            self._valid[run.slot, run.start : run.start + run.count] = True
            for page in np.unique(physical[-1] // self.page_size).tolist():
                self._known.pop(page, None)
            lane = run.lane
            lane.reach = run.start + run.count - 1
            lane.end = max(lane.end, lane.reach + 1)
            del lane.chain[run.start // self.page_size :]
        return torch.from_numpy(np.concatenate(physical)), torch.from_numpy(np.concatenate(logical))

    def _physical(self, slot: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        pages = self._pages[slot, positions // self.page_size].astype(np.int64)
        places: npt.NDArray[np.int64] = pages * self.page_size + positions % self.page_size
        return places

    def remember(self, slot: int, lane: Lane, ids: Sequence[int]) -> None:
        """What the pages hold that the newest entry has filled or passed."""
        size = self.page_size
        full = (lane.reach + 1) // size
        done = len(lane.chain)
        if full <= done:
            return
        extend_chain(lane.chain, ids, full, size)
        pages = self.page_table[slot, :full].tolist()
        for index in range(done, full):
            valid = self.valid[slot, index * size : (index + 1) * size].clone()
            self._known[pages[index]] = _Known(lane.chain[index], valid)

    def _find(self, slot: int, lane: Lane, ids: Sequence[int]) -> None:
        """Take over what the slot's leading pages hold for the same ids."""
        size = self.page_size
        pages = self.page_table[slot, : (len(ids) - 1) // size].tolist()
        for index, page in enumerate(pages):
            known = self._known.get(page)
            if known is None:
                return
            extend_chain(lane.chain, ids, index + 1, size)
            if known.name != lane.chain[index]:
                lane.chain.pop()
                return
            lane.end = (index + 1) * size
            self.valid[slot, index * size : lane.end] = known.valid
