"""What the draft knows of each slot: the log that commits brought, and the tail that a verdict announced."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.messages.rounds import Commit, ProposeRow, VerdictRow
from services.draft.work import DraftRow, HiddenRows


@dataclass(slots=True)
class DraftLog:
    """One tenancy of a slot.

    ids: the log as far as commits brought it. tail: ids that a verdict said come next, not committed yet.
    handed: ids of the last work given to the device for this tenancy. allocated: positions that may be
    written below. row: the slot's row of the last Propose. hidden: rows of the target that no work has been
    given yet.
    """

    row: ProposeRow
    ids: list[int]
    allocated: int = 0
    tail: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    hidden: list[HiddenRows] = field(default_factory=list)

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
            self._forget_hidden(commit.start)
            overlap = 0
        new = commit.ids[overlap:]
        if new:
            agreed = len(self.ids) + _common(new, self.tail)
            self.ids.extend(new)
            self.tail = ()
            self._forget_hidden(min(agreed, len(self.ids) - 1))
        return True

    def _forget_hidden(self, end: int) -> None:
        """Rows of positions from `end` on belong to other ids, or lack the id behind them."""
        kept = [(one, min(one.count, end - one.start)) for one in self.hidden]
        self.hidden = [replace(one, count=count) for one, count in kept if count > 0]

    def foresee(self, row: VerdictRow) -> bool:
        """Take the slot's row of a verdict; True if the next round's verify row is known from it."""
        if row.base != len(self.ids) or row.status not in ("ok", "prefilled"):
            return False
        self.allocated = max(self.allocated, row.allocated)
        self.tail = tuple(row.ids)
        return row.kv >= row.base + len(row.ids) - 1

    def take_hidden(self, row: VerdictRow, block: int, round_: int) -> bool:
        """Keep what a verdict says of this slot's hidden rows, as far as its ids are those of the log: it may
        come before their commit, when it has to be foreseen first, or after it. False if nothing is kept."""
        start = row.kv - row.hidden_count
        behind = self.tail if row.base == len(self.ids) else self.ids[row.base :]
        end = min(row.kv, row.base + _common(behind, row.ids) - 1)
        if row.base > len(self.ids) or row.hidden_first < 0 or start < 0 or end <= start:
            return False
        self.hidden.append(HiddenRows(block, round_, row.hidden_first, end - start, start))
        return True

    @property
    def has_room(self) -> bool:
        """Every known id has its position."""
        return len(self.ids) + len(self.tail) <= self.allocated

    def work(self, k: int, max_model_len: int) -> DraftRow:
        """Draft after the log and its tail, as many of k tokens as the slot has positions for."""
        ids = (*self.ids, *self.tail)
        agreed = self._agreement(ids)
        self.handed = ids
        hidden, self.hidden = tuple(self.hidden), []
        room = min(self.allocated - len(ids), max_model_len - 1 - len(ids))
        depth = max(0, min(k, room))
        return DraftRow(
            self.row.slot, self.key, ids, agreed, self.allocated, depth, self.row.sampling, hidden
        )

    def _agreement(self, ids: tuple[int, ...]) -> int:
        if ids[: len(self.handed)] == self.handed:
            return len(self.handed)
        return _common(ids, self.handed)


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids both begin with."""
    shorter = min(len(ids), len(others))
    return next((i for i in range(shorter) if ids[i] != others[i]), shorter)
