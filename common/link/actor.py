"""Carries out what every ServiceLink asks for: the gateway's socket, timers and the device thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace

from common.actors import frames
from common.actors.actor import Actor, ActorContext, ActorRef
from common.actors.device import DeviceDone, DeviceFailed, DeviceStuck, DeviceThread
from common.actors.machine import SetTimer, Start, TimerFired
from common.actors.transport import DealerEndpoint
from common.alive import touch_alive
from common.link.events import LinkEffect, LinkEvent, Received, Refused, Run, SendGateway
from common.link.link import ServiceLink
from common.memory.free import resident_bytes
from common.messages.conversations import peer_address
from common.messages.lifecycle import Heartbeat, Message
from common.settings import Settings

Event = TypeVar("Event")
Effect = TypeVar("Effect")

LAST_WORK_S = 0.3
"""How long a stop waits for the device. Nobody needs the work that runs then: it may end with the process."""


class LinkActor(Actor["Event | LinkEvent | DeviceDone | DeviceFailed"], Generic[Event, Effect]):
    """One run of a link in its process. A service adds its own sockets and memory, and what its device
    does.

    on_stop: closes what was opened, the newest first, once the device has stopped or is left to itself.
    """

    service: ClassVar[str]
    accepts: ClassVar[Any]
    """What the gateway says to this service."""

    def __init__(
        self, link: ServiceLink[Event, Effect, Any], device: DeviceThread, settings: Settings
    ) -> None:
        self.settings = settings
        self.log = logging.getLogger(self.service)
        self.on_stop = contextlib.ExitStack()
        self._link = link
        self._device = device

    async def started(self, context: ActorContext[Event | LinkEvent | DeviceDone | DeviceFailed]) -> None:
        self.ref: ActorRef[Event | LinkEvent | DeviceDone | DeviceFailed] = context.ref
        self._timers = context.timers
        self._gateway: DealerEndpoint[Message] = DealerEndpoint(
            peer_address(self.settings.run_dir, "gateway"),
            frames.identity(self.service, self._link.incarnation),
            accepts=self.accepts,
            on_message=self.hear,
        )
        self.on_stop.callback(self._gateway.close)
        self._step(Start())

    async def receive(self, message: Event | LinkEvent | DeviceDone | DeviceFailed) -> None:
        if isinstance(message, DeviceDone | DeviceFailed):
            self._step(self.device_answered(message))
        else:
            self._step(message)

    async def stopped(self) -> None:
        with contextlib.suppress(DeviceStuck):
            await self._device.stop(LAST_WORK_S)
        self.on_stop.close()

    @abstractmethod
    def job(self, work: Any) -> Callable[[], object]:
        """What the device does for a Run. Called on the event loop, so that it may take what it needs of the
        actor's memory along."""

    @abstractmethod
    def device_answered(self, answer: DeviceDone | DeviceFailed) -> Event | LinkEvent:
        """The event that tells the link."""

    def hear(self, message: Message) -> None:
        self.ref.tell(Received(message))

    def run_on_device(self, work: object, run: Callable[[], object]) -> None:
        """The answer comes to device_answered with work as its tag."""
        self._device.submit(run, self.ref, work)

    def _step(self, event: Event | LinkEvent) -> None:
        now = asyncio.get_running_loop().time()
        for effect in self._link.handle(event, now):
            self.carry_out(effect, now)

    def carry_out(self, effect: Effect | LinkEffect, now: float) -> None:
        match effect:
            case SendGateway(Heartbeat() as beat):
                self._gateway.send(replace(beat, resident_bytes=resident_bytes()))
            case SendGateway(message):
                self._gateway.send(message)
            case SetTimer(name, at):
                if name == "tick":
                    touch_alive(self.settings.run_dir, self.service)
                self._timers.set(name, at - now, TimerFired(name))
            case Run(work):
                self.run_on_device(work, self.job(work))
            case Refused(reason):
                self.log.error("the gateway refuses this %s: %s", self.service, reason)
