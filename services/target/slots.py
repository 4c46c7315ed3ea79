"""The target's slots: their logs (moved by commits only), their pages, and pages that wait for the draft."""

from collections import deque
from dataclasses import dataclass, field

from common.kv.lengths import pages_for, step_positions
from common.kv.pool import PagePool
from common.kv.slots import SlotTable
from common.messages.lifecycle import Configure
from common.messages.rounds import Admit, Commit
from common.sampling.params import SamplingParams


@dataclass(slots=True)
class Slot:
    """One tenancy of a slot.

    ids: the log as far as the gateway committed it. kv: leading positions whose KV is certain to belong to
    ids. speculated: what the last verdict said comes after ids; the KV of all but its last id is in place.
    """

    slot: int
    generation: int
    request: int
    sampling: SamplingParams
    ids: list[int]
    kv: int = 0
    pages: list[int] = field(default_factory=list)
    speculated: tuple[int, ...] = ()

    def join(self, commit: Commit) -> str:
        """Take a commit: ok | gap (it starts past the log) | conflict (it contradicts the log)."""
        overlap = len(self.ids) - commit.start
        if overlap < 0:
            return "gap"
        if self.ids[commit.start :][: len(commit.ids)] != commit.ids[:overlap]:
            return "conflict"
        new = commit.ids[overlap:]
        if new:
            matched = 0
            for committed, speculated in zip(new, self.speculated[:-1], strict=False):
                if committed != speculated:
                    break
                matched += 1
            self.kv += matched
            self.ids.extend(new)
            self.speculated = ()
        return "ok"


@dataclass(frozen=True, slots=True)
class Retiring:
    """Pages of a slot that ended with `round`; the draft may still write to their drafter KV."""

    round: int
    slot: int
    pages: tuple[int, ...]


class Slots:
    """Every slot and page of one configuration. grown: slots that got pages since the list was last
    cleared."""

    def __init__(self, configure: Configure) -> None:
        self.pool = PagePool(configure.pages, configure.page_size)
        self.table = SlotTable(configure.slots)
        self.max_nodes = configure.max_nodes
        self.max_model_len = configure.max_model_len
        self.live: dict[int, Slot] = {}
        self.retiring: deque[Retiring] = deque()
        self.retiring_pages = 0
        self.grown: list[Slot] = []

    def find(self, request: int, slot: int, generation: int) -> Slot | None:
        found = self.live.get(slot)
        if found is None or found.request != request or found.generation != generation:
            return None
        return found

    def allocated(self, slot: Slot) -> int:
        return len(slot.pages) * self.pool.page_size

    def reserve(self, slot: Slot, committed: int) -> None:
        """Reserve for every node of a step at this committed length, or failing that for its root, or
        nothing."""
        goal = step_positions(committed, self.max_nodes, self.max_model_len)
        if not self._grow(slot, goal):
            self._grow(slot, committed)

    def _grow(self, slot: Slot, positions: int) -> bool:
        missing = pages_for(positions, self.pool.page_size) - len(slot.pages)
        if missing <= 0:
            return True
        taken = self.pool.take(missing)
        if taken is None:
            return False
        slot.pages.extend(taken)
        self.grown.append(slot)
        return True

    def admit(self, admit: Admit) -> Slot | str:
        """A slot with pages for the whole log and its first step, or the status that says why not."""
        committed = len(admit.ids)
        capacity = (self.pool.pages - 1) * self.pool.page_size
        if not 0 < committed < self.max_model_len or committed > capacity:
            return "never_fits"
        goal = pages_for(step_positions(committed, self.max_nodes, self.max_model_len), self.pool.page_size)
        pages = self.pool.take(min(goal, self.pool.pages - 1))
        if pages is None:
            return "no_room"
        given = self.table.give()
        if given is None:
            for page in pages:
                self.pool.drop(page)
            return "no_slot"
        slot, generation = given
        self.live[slot] = Slot(slot, generation, admit.request, admit.sampling, list(admit.ids), 0, pages)
        self.grown.append(self.live[slot])
        return self.live[slot]

    def release(self, slot: Slot, round_: int, acked: int | None) -> None:
        """End a tenancy. acked: newest round that the draft has acknowledged, None without a draft."""
        del self.live[slot.slot]
        entry = Retiring(round_, slot.slot, tuple(slot.pages))
        if acked is None or acked >= round_:
            self._give_back(entry)
        else:
            self.retiring.append(entry)
            self.retiring_pages += len(entry.pages)

    def acknowledge(self, acked: int) -> None:
        """The draft holds nothing of slots that ended with round `acked` or before."""
        while self.retiring and self.retiring[0].round <= acked:
            self._retire_first()

    def draft_gone(self) -> None:
        while self.retiring:
            self._retire_first()

    def _retire_first(self) -> None:
        entry = self.retiring.popleft()
        self.retiring_pages -= len(entry.pages)
        self._give_back(entry)

    def _give_back(self, entry: Retiring) -> None:
        for page in entry.pages:
            self.pool.drop(page)
        self.table.take_back(entry.slot)
