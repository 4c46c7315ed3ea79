"""The draft's groups: they share the device, and what one may do can rest on what another was told."""

from collections import Counter
from itertools import chain
from typing import Any

from common.link.groups import LinkGroups
from common.messages.lifecycle import ConfigureDraft
from common.messages.rounds import Propose
from services.draft import events as ev
from services.draft.logs import DraftLog
from services.draft.rounds import WAITING, Drafting, Rounds


class Groups(LinkGroups[ev.Effect, Rounds]):
    """All rounds under one configuration."""

    def __init__(
        self, configure: ConfigureDraft, extends_ids: bool, join_s: float, counters: Counter[str]
    ) -> None:
        drafting = Drafting(configure.stamp, configure.max_model_len, configure.max_nodes, extends_ids)
        rounds = [Rounds(group, drafting, join_s, counters) for group in range(configure.groups)]
        super().__init__(rounds, counters)

    @property
    def logs(self) -> list[DraftLog]:
        """Of every group."""
        return list(chain.from_iterable(rounds.logs.values() for rounds in self.rounds))

    def dispatch(self, subject: Any) -> None:
        if isinstance(subject, Propose):
            for rounds, newest in zip(self.rounds, subject.sent, strict=False):
                rounds.sent = max(rounds.sent, newest)
        super().dispatch(subject)

    def use_idle_device(self) -> None:
        """Draft ahead of a Propose; else read hidden rows, for which the target waits; else extend, unless a
        group is about to need the device."""
        if any(rounds.draft_ahead() or rounds.read() for rounds in self.in_turn()):
            return
        if all(rounds.state != WAITING for rounds in self.rounds):
            any(rounds.extend() for rounds in self.in_turn())
