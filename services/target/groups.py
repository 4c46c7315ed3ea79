"""The target's groups: they share slots, pages, the prefix cache and the device."""

from collections import Counter
from collections.abc import Sequence

from common.link.groups import LinkGroups
from common.messages.lifecycle import Configure
from common.messages.stamp import Stamp
from services.target import events as ev
from services.target.rounds import Rounds, Serving
from services.target.slots import Slots


class Groups(LinkGroups[ev.Effect, Rounds]):
    """All rounds under one configuration."""

    def __init__(
        self, configure: Configure, stamp: Stamp, vocab_size: int, join_s: float, counters: Counter[str]
    ) -> None:
        self._serving = Serving(Slots(configure), stamp, vocab_size)
        rounds = [Rounds(group, self._serving, join_s, counters) for group in range(configure.groups)]
        super().__init__(rounds, counters)

    @property
    def slots(self) -> Slots:
        return self._serving.slots

    def draft_joins(self, stamp: Stamp, layers: Sequence[int] = ()) -> None:
        """Another draft gets a region: it knows no slot yet, has acknowledged nothing and reads no block.
        layers: whose states it wants in hidden rows."""
        self._serving.stamp = stamp
        self._serving.draft_tested = False
        self._serving.layers = tuple(layers)
        self._serving.blocks.draft_gone()
        for rounds in self.rounds:
            rounds.forget_draft()

    def draft_passes(self) -> None:
        """Its self-test was good: verdicts go to it, and its slots' pages wait for it."""
        self._serving.draft_tested = True

    def draft_gone(self, stamp: Stamp) -> None:
        """What waited for the draft is free; no round waits for it any longer."""
        self.draft_joins(stamp)
        self.slots.draft_gone()
        for rounds in self.rounds:
            rounds.stop_joining()
        self.pass_device()

    def export_all(self) -> None:
        """Every slot's pages, for a new region."""
        self.effects += [ev.ExportRow(slot.slot, tuple(slot.pages)) for slot in self.slots.live.values()]
