"""The rounds of a service under one configuration, as far as they are alike."""

from collections import Counter
from typing import TypeVar

from common.actors.machine import Machine, TimerFired

Effect = TypeVar("Effect")


class LinkRounds(Machine[Effect]):
    """The link around it gives effects and now before each event.

    join_s: how long a round waits for what it joins with. finished: rounds or works that ended, as heartbeats
    tell them.
    """

    def __init__(self, state: str, join_s: float, counters: Counter[str]) -> None:
        super().__init__(state, counters)
        self.finished = 0
        self._join_s = join_s
        self._join_by = 0.0

    def wait_to_join(self) -> None:
        self._join_by = self.now + self._join_s
        self.set_timer("join", self._join_by)

    def has_waited(self, event: TimerFired) -> bool:
        """Whether this timer ends the wait that was begun last."""
        return event.name == "join" and self.is_due(self._join_by)
