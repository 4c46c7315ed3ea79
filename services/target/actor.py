"""Carries the effects of the TargetLink out: the sockets of drafts, shared memory and the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from common.actors.actor import ActorContext
from common.actors.device import DeviceDone, DeviceFailed, DeviceThread
from common.actors.transport import RouterEndpoint
from common.link.actor import LinkActor
from common.memory.arena import ArenaError
from common.memory.handle import HandleError
from common.messages.conversations import DraftToTarget, GatewayToTarget, peer_address
from common.messages.lifecycle import Configure, JoinDraft, Message, SelfTest
from common.service import StartupError
from common.settings import Settings
from services.target import events as ev
from services.target.link import TargetLink
from services.target.memory import Exports, RegionRefused
from services.target.runner import TargetRunner
from services.target.work import RoundResult, RoundWork

KNOWN_DRAFTS = 64
"""Peers of the draft socket that are remembered by incarnation."""


class TargetActor(LinkActor[ev.Event, ev.Effect]):
    service = "target"
    accepts = GatewayToTarget

    def __init__(
        self,
        link: TargetLink,
        runner: TargetRunner,
        device: DeviceThread,
        settings: Settings,
        max_rows: int,
    ) -> None:
        super().__init__(link, device, settings)
        self._runner = runner
        self._max_rows = max_rows
        self._exports: Exports | None = None
        self._peers: dict[int, str] = {}
        self.on_stop.callback(self._close_exports)

    async def started(self, context: ActorContext[ev.Event | DeviceDone | DeviceFailed]) -> None:
        self._drafts: RouterEndpoint[Message] = RouterEndpoint(
            peer_address(self.settings.run_dir, "target"),
            accepts=DraftToTarget,
            on_message=self._hear_draft,
        )
        self.on_stop.callback(self._drafts.close)
        await super().started(context)

    def job(self, work: RoundWork) -> Callable[[], RoundResult]:
        assert self._exports is not None
        capture = work.capture
        block = self._exports.hidden_block(capture.draft, capture.block) if capture else None
        return functools.partial(self._runner.execute, work, block)

    def device_answered(self, answer: DeviceDone | DeviceFailed) -> ev.Event:
        match answer:
            case DeviceDone(_, RoundResult() as result):
                return ev.Executed(result)
            case DeviceDone(Configure() as configure, _):
                return ev.PoolReady(configure.target, self._drafts.address)
            case DeviceFailed(RoundWork() as work, error, trace):
                self.log.error("round %d failed: %s\n%s", work.round, error, trace)
                return ev.Executed(RoundResult(work.group, work.round, (), 0, error))
            case DeviceFailed(Configure(), error, _):
                raise StartupError(f"KV memory cannot be had: {error}; lower --kv-memory")
        raise AssertionError(f"the device answered work that nobody gave: {answer}")

    def _hear_draft(self, peer: str, message: Message) -> None:
        if isinstance(message, SelfTest):
            self._peers.pop(message.stamp.draft, None)
            self._peers[message.stamp.draft] = peer
            while len(self._peers) > KNOWN_DRAFTS:
                del self._peers[next(iter(self._peers))]
        self.ref.tell(ev.Received(message))

    def carry_out(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.SendDraft(draft, message):
                if peer := self._peers.get(draft):
                    self._drafts.send(peer, message)
            case ev.AllocatePool(configure):
                self._allocate_pool(configure)
            case ev.AllocateDraft(join):
                self.ref.post(self._allocate_region(join))
            case ev.FreeDraft():
                if self._exports is not None:
                    self._exports.free_regions()
            case ev.TestRegion(draft, nonce):
                ok = self._exports is not None and self._exports.test_region(draft, nonce)
                self.ref.post(ev.RegionTested(draft, nonce, ok))
            case ev.ExportRow(slot, pages):
                if self._exports is not None:
                    self._exports.export_row(slot, pages)
            case _:
                super().carry_out(effect, now)

    def _allocate_pool(self, configure: Configure) -> None:
        self._close_exports()
        try:
            self._exports = Exports(
                configure, self._runner.model, self._max_rows, Path(self.settings.shm_dir)
            )
        except ArenaError as error:
            raise StartupError(str(error)) from error
        self.run_on_device(configure, lambda: self._runner.allocate(configure))

    def _close_exports(self) -> None:
        if self._exports is not None:
            self._exports.close()
            self._exports = None

    def _allocate_region(self, join: JoinDraft) -> ev.RegionReady:
        assert self._exports is not None
        draft = join.stamp.draft
        try:
            manifest = self._exports.allocate_region(join)
            self._runner.read_embedding_at(self._exports.embedding)
            return ev.RegionReady(draft, manifest)
        except (ArenaError, HandleError, RegionRefused) as error:
            self.log.error("no drafter region: %s", error)
            return ev.RegionReady(draft, b"", str(error))
