"""A state machine without I/O: an event and the time go in, effects come out for the actor around it.

Times are seconds on one monotonic clock.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from common.actors.table import Table

TIMER_SLACK_S = 1e-3
"""What is due within it is due now: a timer may fire a little early by the clock that set it."""


@dataclass(frozen=True, slots=True)
class Start:
    """First event of a machine's life."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    name: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Replaces an earlier timer of the same name."""

    name: str
    at: float


Effect = TypeVar("Effect")


class Machine(Generic[Effect]):
    """Dispatches by its table. Whoever drives it sets effects and now before each event; handlers append to
    effects, which are carried out in order.

    counters: what was dropped, repeated or otherwise worth a number.
    """

    table: ClassVar[Table]

    def __init__(self, state: str, counters: Counter[str]) -> None:
        self.state = state
        self.counters = counters
        self.effects: list[Effect | SetTimer] = []
        self.now = 0.0

    def dispatch(self, subject: object) -> None:
        """subject: an event, or the message that one brought."""
        self.table.dispatch(self, self.state, subject, self.counters)

    def set_timer(self, name: str, at: float) -> None:
        self.effects.append(SetTimer(name, at))

    def is_due(self, at: float) -> bool:
        return self.now + TIMER_SLACK_S >= at
