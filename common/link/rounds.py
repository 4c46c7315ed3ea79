"""The rounds of one group in a service, as far as target and draft are alike."""

from collections import Counter
from typing import TypeVar

from common.actors.machine import Machine

Effect = TypeVar("Effect")

QUEUED, RUNNING = "queued", "running"
"""States that a group's rounds have in both services: their work waits for the device, or is on it."""


class LinkRounds(Machine[Effect]):
    """The groups around it give effects and now before each event.

    join_s: how long a round waits for what it joins with. finished: rounds or works that ended, as heartbeats
    tell them.
    """

    def __init__(self, group: int, state: str, join_s: float, counters: Counter[str]) -> None:
        super().__init__(state, counters)
        self.group = group
        self.finished = 0
        self.timer = f"join:{group}"
        self._join_s = join_s
        self._join_by = 0.0

    def wait_to_join(self) -> None:
        self._join_by = self.now + self._join_s
        self.set_timer(self.timer, self._join_by)

    def has_waited(self) -> bool:
        """Whether the group's timer ends the wait that was begun last."""
        return self.is_due(self._join_by)

    def use_device(self) -> None:
        """The device is free and this group, which is queued, is next: take it, or leave the queue."""
        raise NotImplementedError
