"""Carries the effects of the TargetLink out: sockets, timers, shared memory and the device thread."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from common.actors import frames
from common.actors.actor import Actor, ActorContext, ActorRef
from common.actors.device import DeviceDone, DeviceFailed, DeviceThread
from common.actors.transport import DealerEndpoint, RouterEndpoint
from common.alive import touch_alive
from common.memory.arena import ArenaError, TensorSpec
from common.memory.handle import HandleError
from common.messages.conversations import DraftToTarget, GatewayToTarget, peer_address
from common.messages.lifecycle import Configure, Message, SelfTest
from common.service import StartupError
from common.settings import Settings
from services.target import events as ev
from services.target.link import TargetLink
from services.target.memory import Exports
from services.target.runner import TargetRunner
from services.target.work import RoundResult, RoundWork

log = logging.getLogger("target")

KNOWN_DRAFTS = 64
"""Peers of the draft socket that are remembered by incarnation."""


class TargetActor(Actor["ev.Event | DeviceDone | DeviceFailed"]):
    """hidden: shape of the hidden rows that drafts may read."""

    def __init__(
        self,
        link: TargetLink,
        runner: TargetRunner,
        device: DeviceThread,
        settings: Settings,
        hidden: TensorSpec,
    ) -> None:
        self._link = link
        self._runner = runner
        self._device = device
        self._settings = settings
        self._hidden = hidden
        self._exports: Exports | None = None
        self._peers: dict[int, str] = {}

    async def started(self, context: ActorContext[ev.Event | DeviceDone | DeviceFailed]) -> None:
        self._ref: ActorRef[ev.Event | DeviceDone | DeviceFailed] = context.ref
        self._timers = context.timers
        self._drafts: RouterEndpoint[Message] = RouterEndpoint(
            peer_address(self._settings.run_dir, "target"),
            accepts=DraftToTarget,
            on_message=self._hear_draft,
        )
        self._gateway: DealerEndpoint[Message] = DealerEndpoint(
            peer_address(self._settings.run_dir, "gateway"),
            frames.identity("target", self._link.incarnation),
            accepts=GatewayToTarget,
            on_message=lambda message: self._ref.tell(ev.Received(message)),
        )
        self._step(ev.Start())

    async def receive(self, message: ev.Event | DeviceDone | DeviceFailed) -> None:
        match message:
            case DeviceDone(_, RoundResult() as result):
                self._step(ev.Executed(result))
            case DeviceDone(Configure() as configure, _):
                self._step(ev.PoolReady(configure.target, self._drafts.address))
            case DeviceFailed(RoundWork() as work, error, trace):
                log.error("round %d failed: %s\n%s", work.round, error, trace)
                self._step(ev.Executed(RoundResult(work.group, work.round, (), 0, error)))
            case DeviceFailed(Configure() as configure, error, trace):
                log.error("KV memory could not be allocated: %s\n%s", error, trace)
                self._step(ev.PoolReady(configure.target, "", error))
            case DeviceDone() | DeviceFailed():
                raise AssertionError(f"the device answered work that nobody gave: {message}")
            case _:
                self._step(message)

    async def stopped(self) -> None:
        self._gateway.close()
        self._drafts.close()
        if self._exports is not None:
            self._exports.close()

    def _hear_draft(self, peer: str, message: Message) -> None:
        if isinstance(message, SelfTest):
            self._peers.pop(message.stamp.draft, None)
            self._peers[message.stamp.draft] = peer
            while len(self._peers) > KNOWN_DRAFTS:
                del self._peers[next(iter(self._peers))]
        self._ref.tell(ev.Received(message))

    def _step(self, event: ev.Event) -> None:
        now = asyncio.get_running_loop().time()
        for effect in self._link.handle(event, now):
            self._carry_out(effect, now)

    def _carry_out(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.SendGateway(message):
                self._gateway.send(message)
            case ev.SendDraft(draft, message):
                if peer := self._peers.get(draft):
                    self._drafts.send(peer, message)
            case ev.SetTimer(name, at):
                if name == "tick":
                    touch_alive(self._settings.run_dir, "target")
                self._timers.set(name, at - now, ev.TimerFired(name))
            case ev.Run(work):
                self._device.submit(lambda: self._runner.execute(work), self._ref, work)
            case ev.AllocatePool(configure):
                self._allocate_pool(configure)
            case ev.AllocateDraft(draft, kv_bytes_per_position):
                self._ref.post(self._allocate_region(draft, kv_bytes_per_position))
            case ev.FreeDraft():
                if self._exports is not None:
                    self._exports.free_regions()
            case ev.TestRegion(draft, nonce):
                ok = self._exports is not None and self._exports.test_region(draft, nonce)
                self._ref.post(ev.RegionTested(draft, nonce, ok))
            case ev.ExportRow(slot, pages):
                if self._exports is not None:
                    self._exports.export_row(slot, pages)
            case ev.Refused(reason):
                log.error("the gateway refuses this target: %s", reason)

    def _allocate_pool(self, configure: Configure) -> None:
        if self._exports is not None:
            self._exports.close()
            self._exports = None
        try:
            self._exports = Exports(configure, self._hidden, Path(self._settings.shm_dir))
        except ArenaError as error:
            raise StartupError(str(error)) from error
        self._device.submit(lambda: self._runner.allocate(configure), self._ref, configure)

    def _allocate_region(self, draft: int, kv_bytes_per_position: int) -> ev.RegionReady:
        assert self._exports is not None
        try:
            return ev.RegionReady(draft, self._exports.allocate_region(draft, kv_bytes_per_position))
        except (ArenaError, HandleError) as error:
            log.error("no drafter region: %s", error)
            return ev.RegionReady(draft, b"", str(error))
