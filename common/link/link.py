"""A service's side of the protocol towards its gateway, without I/O: Hello, liveness, starting over."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from msgspec.structs import replace

from common.actors.machine import Machine, Start, TimerFired
from common.link.events import Executed, LinkEffect, LinkEvent, Received, Refused, Run, SendGateway
from common.link.groups import LinkGroups
from common.messages.lifecycle import DraftHello, Heartbeat, Message, StartOver, TargetHello
from common.messages.lifecycle import Refused as RefusedMessage
from common.messages.stamp import Stamp

NO_STAMP = Stamp(0, 0, 0)

Event = TypeVar("Event")
Effect = TypeVar("Effect")
Groups = TypeVar("Groups", bound=LinkGroups[Any, Any])


class LinkOptions(Protocol):
    """heartbeat_s: between heartbeats, and between repeats of Hello. silence_s: a gateway that said nothing
    for so long is lost, and the link starts over."""

    @property
    def heartbeat_s(self) -> float: ...
    @property
    def silence_s(self) -> float: ...


class ServiceLink(Machine["Effect | LinkEffect"], ABC, Generic[Event, Effect, Groups]):
    """Says Hello until the gateway configures it, then beats; starts over when the gateway is silent or says
    so. Its tables name the handlers below for what every service does alike.

    profile: the Hello to introduce this process with; its incarnation is replaced by one from new_id, drawn
    again each time the link starts over. new_id gives random non-zero ids. stamp: what current messages
    carry, NO_STAMP until configured. groups: None until rounds may come. device_us: time of the
    device work that ended under this incarnation.
    """

    hello_state: ClassVar[str]
    from_peer: ClassVar[tuple[type[Message], ...]]
    """Messages of the other service: they do not show that the gateway lives."""

    def __init__(
        self, profile: TargetHello | DraftHello, options: LinkOptions, new_id: Callable[[], int]
    ) -> None:
        super().__init__(self.hello_state, Counter())
        self.device_busy = False
        self.options = options
        self._profile = profile
        self._new_id = new_id
        self._reset()

    def _reset(self) -> None:
        """What an incarnation begins with."""
        self.state = self.hello_state
        self.stamp = NO_STAMP
        self.groups: Groups | None = None
        self.device_us = 0
        self._hello = replace(self._profile, incarnation=self._new_id())
        self._heard_at = self.now

    @property
    def incarnation(self) -> int:
        return self._hello.incarnation

    @property
    def epoch(self) -> int:
        return self.stamp.epoch

    def handle(self, event: Event | LinkEvent, now: float) -> list[Effect | LinkEffect]:
        """The effects of one event, to be carried out in order. now: seconds, never going back."""
        effects: list[Effect | LinkEffect] = []
        self.effects, self.now = effects, now
        if self.groups is not None:
            self.groups.begin(effects, now)
        if isinstance(event, Executed):
            self.device_busy = False
            self.device_us += event.result.elapsed_us
        if not isinstance(event, Received):
            self.dispatch(event)
        elif self._is_current(event.message):
            if not isinstance(event.message, self.from_peer):
                self._heard_at = now
            self.dispatch(event.message)
        else:
            self.count_stale(event.message)
        if any(isinstance(effect, Run) for effect in effects):
            self.device_busy = True
        return effects

    @abstractmethod
    def _is_current(self, message: Message) -> bool:
        """Whether the message is meant for this incarnation and comes from the peers that it knows."""

    def is_for_this_incarnation(self, message: RefusedMessage | StartOver | Heartbeat) -> bool:
        same_epoch = not isinstance(message, Heartbeat) or message.epoch == self.stamp.epoch
        return message.incarnation == self.incarnation and same_epoch

    def count_stale(self, subject: object) -> None:
        self.counters[f"stale:{type(subject).__name__}"] += 1

    def pass_to_rounds(self, subject: object) -> None:
        """To the rounds of its group: see their table. Then the device, if it is free, goes to a group that
        is queued for it, in turn."""
        assert self.groups is not None
        self.groups.dispatch(subject)

    def say_hello(self, _: Start | TimerFired) -> None:
        """Say Hello, and again after heartbeat_s."""
        self.effects.append(SendGateway(self._hello))
        self._set_tick()

    def note_refusal(self, message: RefusedMessage) -> None:
        """Report the reason; Hello goes on."""
        self.effects.append(Refused(message.reason))

    def hear(self, _: Heartbeat) -> None:
        """The gateway lives, as every message of it shows."""

    def on_timer(self, event: TimerFired) -> None:
        """tick: send a heartbeat, or start over if the gateway has been silent for silence_s. Any other:
        pass_to_rounds."""
        if event.name == "tick":
            self._beat()
        elif self.groups is not None:
            self.pass_to_rounds(event)

    def leave(self, _: StartOver) -> None:
        """Start over; for what the device still does see `Executed`."""
        self._start_over()

    @property
    def gateway_is_silent(self) -> bool:
        return self.now - self._heard_at >= self.options.silence_s

    def _beat(self) -> None:
        if self.gateway_is_silent:
            self.counters["gateway_silent"] += 1
            self._start_over()
            return
        finished = self.groups.finished if self.groups is not None else 0
        beat = Heartbeat(self.stamp.epoch, self.incarnation, finished, self.device_busy, self.device_us)
        self.effects.append(SendGateway(beat))
        self._set_tick()

    def _set_tick(self) -> None:
        self.set_timer("tick", self.now + self.options.heartbeat_s)

    def _start_over(self) -> None:
        """Forget everything and say Hello as a new incarnation."""
        self._reset()
        self.say_hello(Start())
