"""Carries the effects of the DraftLink out: sockets, timers, mapped memory and the device thread."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from common.actors import frames
from common.actors.actor import Actor, ActorContext, ActorRef
from common.actors.device import DeviceDone, DeviceFailed, DeviceThread
from common.actors.endpoint import TransportError
from common.actors.ipc import AddressError
from common.actors.transport import DealerEndpoint
from common.alive import touch_alive
from common.memory.handle import HandleError
from common.messages.conversations import GatewayToDraft, TargetToDraft, peer_address
from common.messages.lifecycle import ConfigureDraft, Message
from common.messages.rounds import Propose
from common.settings import Settings
from services.draft import events as ev
from services.draft.drafters.base import Drafter
from services.draft.link import DraftLink
from services.draft.memory import Mapped
from services.draft.work import DraftResult, DraftWork

log = logging.getLogger("draft")


class DraftActor(Actor["ev.Event | DeviceDone | DeviceFailed"]):
    """The link asks for Attach and Detach only while the device is idle, so that the drafter may be touched
    from the event loop then."""

    def __init__(self, link: DraftLink, drafter: Drafter, device: DeviceThread, settings: Settings) -> None:
        self._link = link
        self._drafter = drafter
        self._device = device
        self._settings = settings
        self._mapped: Mapped | None = None
        self._target: DealerEndpoint[Message] | None = None

    async def started(self, context: ActorContext[ev.Event | DeviceDone | DeviceFailed]) -> None:
        self._ref: ActorRef[ev.Event | DeviceDone | DeviceFailed] = context.ref
        self._timers = context.timers
        self._gateway: DealerEndpoint[Message] = DealerEndpoint(
            peer_address(self._settings.run_dir, "gateway"),
            frames.identity("draft", self._link.incarnation),
            accepts=GatewayToDraft,
            on_message=self._hear,
        )
        self._step(ev.Start())

    async def receive(self, message: ev.Event | DeviceDone | DeviceFailed) -> None:
        match message:
            case DeviceDone(DraftWork() as work, trees):
                self._step(ev.Executed(DraftResult(work.group, work.round, trees)))
            case DeviceFailed(DraftWork() as work, error, trace):
                log.error("drafting for round %d failed: %s\n%s", work.round, error, trace)
                self._step(ev.Executed(DraftResult(work.group, work.round, (), error)))
            case DeviceDone() | DeviceFailed():
                raise AssertionError(f"the device answered work that nobody gave: {message}")
            case _:
                self._step(message)

    async def stopped(self) -> None:
        self._gateway.close()
        self._detach()

    def _hear(self, message: Message) -> None:
        if self._settings.check_page_table and isinstance(message, Propose) and self._mapped is not None:
            for row in message.rows:
                if fault := self._mapped.page_table_fault(row):
                    log.error("page table of round %d: %s", message.round, fault)
        self._ref.tell(ev.Received(message))

    def _step(self, event: ev.Event) -> None:
        now = asyncio.get_running_loop().time()
        for effect in self._link.handle(event, now):
            self._carry_out(effect, now)

    def _carry_out(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.SendGateway(message):
                self._gateway.send(message)
            case ev.SendTarget(message):
                if self._target is not None:
                    self._target.send(message)
            case ev.SetTimer(name, at):
                if name == "tick":
                    touch_alive(self._settings.run_dir, "draft")
                self._timers.set(name, at - now, ev.TimerFired(name))
            case ev.Run(work):
                self._device.submit(lambda: self._drafter.draft(work), self._ref, work)
            case ev.Attach(configure):
                self._attach(configure)
            case ev.Detach():
                self._detach()
            case ev.WritePattern(nonce):
                if self._mapped is not None:
                    self._mapped.write_pattern(nonce)
            case ev.ReadPattern(draft, nonce):
                ok = self._mapped is not None and self._mapped.has_pattern(nonce)
                self._ref.post(ev.PatternRead(draft, nonce, ok))
            case ev.Refused(reason):
                log.error("the gateway refuses this draft: %s", reason)

    def _attach(self, configure: ConfigureDraft) -> None:
        self._detach()
        try:
            mapped = Mapped(configure, self._drafter.kv_bytes_per_position, Path(self._settings.shm_dir))
            self._target = DealerEndpoint(
                configure.endpoint,
                frames.identity("draft", configure.stamp.draft),
                accepts=TargetToDraft,
                on_message=lambda message: self._ref.tell(ev.Received(message)),
            )
        except (HandleError, AddressError, TransportError) as error:
            log.error("cannot attach to the target: %s", error)
            self._ref.post(ev.Attached(configure.stamp.draft, str(error)))
            return
        self._mapped = mapped
        self._drafter.attach(mapped.shared)
        self._ref.post(ev.Attached(configure.stamp.draft))

    def _detach(self) -> None:
        self._drafter.detach()
        if self._target is not None:
            self._target.close()
            self._target = None
        if self._mapped is not None:
            self._mapped.detach()
            self._mapped = None
