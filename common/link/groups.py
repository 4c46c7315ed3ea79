"""The groups of a service under one configuration: each has its rounds, and they take turns on the device."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from common.actors.machine import SetTimer, TimerFired
from common.link.events import Executed
from common.link.rounds import QUEUED, RUNNING, LinkRounds

Effect = TypeVar("Effect")
Rounds = TypeVar("Rounds", bound=LinkRounds[Any])


class LinkGroups(Generic[Effect, Rounds]):
    """Gives each event to the rounds of its group, then the device, when it is free, to a group that waits
    for it. rounds: by group."""

    def __init__(self, rounds: Sequence[Rounds], counters: Counter[str]) -> None:
        self.rounds = tuple(rounds)
        self.counters = counters
        self.effects: list[Effect | SetTimer] = []
        self._last = 0

    def begin(self, effects: list[Effect | SetTimer], now: float) -> None:
        """Before each event."""
        self.effects = effects
        for rounds in self.rounds:
            rounds.effects, rounds.now = effects, now

    @property
    def finished(self) -> int:
        return sum(rounds.finished for rounds in self.rounds)

    def dispatch(self, subject: Any) -> None:
        if rounds := self._rounds_of(subject):
            rounds.dispatch(subject)
            self.pass_device()
        else:
            self.counters[f"no_group:{type(subject).__name__}"] += 1

    def _rounds_of(self, subject: Any) -> Rounds | None:
        if isinstance(subject, TimerFired):
            return next((rounds for rounds in self.rounds if rounds.timer == subject.name), None)
        group = subject.result.group if isinstance(subject, Executed) else subject.group
        return self.rounds[group] if 0 <= group < len(self.rounds) else None

    def in_turn(self) -> Iterator[Rounds]:
        """The group that had the device last comes last."""
        count = len(self.rounds)
        return (self.rounds[(self._last + step) % count] for step in range(1, count + 1))

    def pass_device(self) -> None:
        if self._takes_device():
            return
        for rounds in self.in_turn():
            if rounds.state == QUEUED:
                rounds.use_device()
                if self._takes_device():
                    return
        self.use_idle_device()
        self._takes_device()

    def use_idle_device(self) -> None:
        """Nobody waits for the device: give it what may be worth doing."""

    def _takes_device(self) -> bool:
        for rounds in self.rounds:
            if rounds.state == RUNNING:
                self._last = rounds.group
                return True
        return False
