"""What the draft knows of each slot: the log that commits brought, and the tail that a verdict announced."""

from dataclasses import dataclass

from common.messages.rounds import Commit, ProposeRow, VerdictRow
from services.draft.work import DraftRow


@dataclass(slots=True)
class DraftLog:
    """One tenancy of a slot.

    ids: the log as far as commits brought it. tail: ids that a verdict said come next, not committed yet.
    handed: ids of the last work given to the device for this tenancy. allocated: positions that may be
    written below. row: the slot's row of the last Propose.
    """

    row: ProposeRow
    ids: list[int]
    allocated: int = 0
    tail: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        return self.row.request, self.row.generation

    def join(self, row: ProposeRow) -> bool:
        """Take the slot's row of a new Propose; False if its commit starts past the log. A commit wins over
        what the log held."""
        self.row = row
        self.allocated = max(self.allocated, row.allocated)
        commit: Commit = row.commit
        overlap = len(self.ids) - commit.start
        if overlap < 0:
            return False
        if self.ids[commit.start :] != commit.ids[:overlap]:
            del self.ids[commit.start :]
            overlap = 0
        if len(commit.ids) > overlap:
            self.ids.extend(commit.ids[overlap:])
            self.tail = ()
        return True

    def foresee(self, row: VerdictRow) -> bool:
        """Take the slot's row of a verdict; True if the next round's verify row is known from it."""
        if row.base != len(self.ids) or row.status not in ("ok", "prefilled"):
            return False
        self.allocated = max(self.allocated, row.allocated)
        self.tail = tuple(row.ids)
        return row.kv >= row.base + len(row.ids) - 1

    @property
    def has_room(self) -> bool:
        """Every known id has its position."""
        return len(self.ids) + len(self.tail) <= self.allocated

    def work(self, k: int, max_model_len: int) -> DraftRow:
        """Draft after the log and its tail, as many of k tokens as the slot has positions for."""
        ids = (*self.ids, *self.tail)
        agreed = self._agreement(ids)
        self.handed = ids
        room = min(self.allocated - len(ids), max_model_len - 1 - len(ids))
        depth = max(0, min(k, room))
        return DraftRow(self.row.slot, self.key, ids, agreed, self.allocated, depth, self.row.sampling)

    def _agreement(self, ids: tuple[int, ...]) -> int:
        if ids[: len(self.handed)] == self.handed:
            return len(self.handed)
        return next(
            (i for i, (new, old) in enumerate(zip(ids, self.handed, strict=False)) if new != old), len(ids)
        )
