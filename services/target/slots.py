"""The target's slots: their logs (moved by commits only), their pages, and pages that wait for the draft.

Pages that are full of committed ids are shared with every later log that begins alike, at once: also those of
a slot that still runs, and those that wait for the draft. The draft goes on writing drafter KV to the pages
of its slots, shared or not. Why that is safe:

* Text comes from the target's KV alone, and the target writes to no page that is in the cache.
* A page is given out for other ids only when no slot holds it, and a slot's hold ends with the draft's
  acknowledgement of the round, of the slot's group, that released it.
* A new holder's drafter KV is computed from position 0, whatever the page holds. The draft's device does one
  work at a time. Work under an older live set ends before the new holder's begins; afterwards every log that
  is worked on holds the ids of the shared page, so what it writes there are the same bits. For a log of
  another group that is so because the new holder's Propose names the newest one of every group
  (`Propose.sent`), and the draft starts no work for a group of which it has missed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.lengths import pages_for, step_positions
from common.kv.pool import PagePool
from common.kv.prefix_cache import Chain, PrefixCache, extend_chain
from common.kv.slots import SlotTable
from common.messages.lifecycle import Configure
from common.messages.rounds import Admit, Commit
from common.sampling.params import SamplingParams


@dataclass(slots=True)
class Slot:
    """One tenancy of a slot.

    ids: the log as far as the gateway committed it. kv: leading positions whose KV is certain to belong to
    ids. speculated: what the last verdict said comes after ids; the KV of all but its last id is in place.
    cached: leading positions whose KV was there at admission. chain: names of the leading pages that are
    settled: full of committed ids with their KV, never written again.
    """

    slot: int
    generation: int
    group: int
    request: int
    sampling: SamplingParams
    ids: list[int]
    kv: int = 0
    pages: list[int] = field(default_factory=list)
    speculated: tuple[int, ...] = ()
    cached: int = 0
    chain: Chain = field(default_factory=list)

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
    """Pages of a slot that ended with `round` of its group; the draft may still write to their drafter KV."""

    group: int
    round: int
    slot: int
    pages: tuple[int, ...]
    chain: Chain


class Slots:
    """Every slot and page of one configuration. cache gives the pages of pool out. grown: slots that got
    pages since the list was last cleared."""

    def __init__(self, configure: Configure) -> None:
        self.pool = PagePool(configure.pages, configure.page_size)
        self.cache = PrefixCache(self.pool)
        self.table = SlotTable(configure.slots)
        self.max_nodes = configure.max_nodes
        self.max_model_len = configure.max_model_len
        self.live: dict[int, Slot] = {}
        self.retiring: list[Retiring] = []
        self.grown: list[Slot] = []

    @property
    def retiring_pages(self) -> int:
        return sum(len(entry.pages) for entry in self.retiring)

    def live_in(self, group: int) -> list[Slot]:
        return [slot for slot in self.live.values() if slot.group == group]

    def find(self, group: int, request: int, slot: int, generation: int) -> Slot | None:
        found = self.live.get(slot)
        if found is None or (found.group, found.request, found.generation) != (group, request, generation):
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
        taken = self.cache.take(missing)
        if taken is None:
            return False
        slot.pages.extend(taken)
        self.grown.append(slot)
        return True

    def admit(self, group: int, admit: Admit) -> Slot | str:
        """A slot with pages for the whole log and its first step, or the status that says why not."""
        committed = len(admit.ids)
        capacity = (self.pool.pages - 1) * self.pool.page_size
        if not 0 < committed < self.max_model_len or committed > capacity:
            return "never_fits"
        size = self.pool.page_size
        goal = pages_for(step_positions(committed, self.max_nodes, self.max_model_len), size)
        pages, chain = self.cache.hold(admit.ids, (committed - 1) // size)
        cached = len(pages) * size
        fresh = self.cache.take(min(goal, self.pool.pages - 1) - len(pages))
        if fresh is None:
            self.cache.let_go(pages, chain)
            return "no_room"
        pages += fresh
        given = self.table.give()
        if given is None:
            self.cache.let_go(pages, chain)
            return "no_slot"
        slot, generation = given
        self.live[slot] = Slot(
            slot,
            generation,
            group,
            admit.request,
            admit.sampling,
            list(admit.ids),
            kv=cached,
            pages=pages,
            cached=cached,
            chain=chain,
        )
        self.grown.append(self.live[slot])
        return self.live[slot]

    def settle(self, slot: Slot) -> None:
        """Let the pages that have come to hold committed ids alone be found by others.

        The bonus token's page is not among them: the next tree is written from its position on.
        """
        full = min(slot.kv, len(slot.ids) - 1) // self.pool.page_size
        if full > len(slot.chain):
            extend_chain(slot.chain, slot.ids, full, self.pool.page_size)
            self.cache.enter(slot.pages, slot.chain)

    def first_writable(self, slot: Slot) -> int:
        """Position below which the slot's pages are settled and may be shared."""
        return len(slot.chain) * self.pool.page_size

    def release(self, slot: Slot, round_: int, acked: int | None) -> None:
        """End a tenancy with this round of its group. acked: newest round of the group that the draft has
        acknowledged, None without a draft."""
        del self.live[slot.slot]
        self.settle(slot)
        entry = Retiring(slot.group, round_, slot.slot, tuple(slot.pages), slot.chain)
        if acked is None or acked >= round_:
            self._give_back(entry)
        else:
            self.retiring.append(entry)

    def acknowledge(self, group: int, acked: int) -> None:
        """The draft holds nothing of slots that ended with round `acked` of the group or before."""
        self._retire([one for one in self.retiring if one.group == group and one.round <= acked])

    def draft_gone(self) -> None:
        self._retire(list(self.retiring))

    def _retire(self, entries: Sequence[Retiring]) -> None:
        for entry in entries:
            self.retiring.remove(entry)
            self._give_back(entry)

    def _give_back(self, entry: Retiring) -> None:
        self.cache.enter(entry.pages, entry.chain)
        self.cache.let_go(entry.pages, entry.chain)
        self.table.take_back(entry.slot)
