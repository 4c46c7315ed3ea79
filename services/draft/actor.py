"""Carries the effects of the DraftLink out: the socket to its target, mapped memory and the drafter."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from common.actors import frames
from common.actors.device import DeviceDone, DeviceFailed, DeviceThread
from common.actors.endpoint import TransportError
from common.actors.ipc import AddressError
from common.actors.transport import DealerEndpoint
from common.link.actor import LinkActor
from common.memory.handle import HandleError
from common.messages.conversations import GatewayToDraft, TargetToDraft
from common.messages.lifecycle import ConfigureDraft, Message
from common.messages.rounds import Propose
from common.settings import Settings
from services.draft import events as ev
from services.draft.drafters.base import Drafter
from services.draft.link import DraftLink
from services.draft.memory import Mapped
from services.draft.work import DraftResult, DraftWork


class DraftActor(LinkActor[ev.Event, ev.Effect]):
    """The link asks for Attach and Detach only while the device is idle, so that the drafter may be touched
    from the event loop then."""

    service = "draft"
    accepts = GatewayToDraft

    def __init__(self, link: DraftLink, drafter: Drafter, device: DeviceThread, settings: Settings) -> None:
        super().__init__(link, device, settings)
        self._drafter = drafter
        self._mapped: Mapped | None = None
        self._target: DealerEndpoint[Message] | None = None
        self.on_stop.callback(self._let_go)

    def job(self, work: DraftWork) -> Callable[[], DraftResult]:
        return functools.partial(self._draft, work)

    def _draft(self, work: DraftWork) -> DraftResult:
        started = time.perf_counter()
        drafts = self._drafter.draft(work)
        if drafts.faults:
            self.log.warning("round %d: hidden rows not used: %s", work.round, ", ".join(drafts.faults))
        elapsed_us = round((time.perf_counter() - started) * 1e6)
        return DraftResult(work.group, work.round, drafts.trees, elapsed_us=elapsed_us, faults=drafts.faults)

    def device_answered(self, answer: DeviceDone | DeviceFailed) -> ev.Event:
        match answer:
            case DeviceDone(_, DraftResult() as result):
                return ev.Executed(result)
            case DeviceFailed(DraftWork() as work, error, trace):
                self.log.error("drafting for round %d failed: %s\n%s", work.round, error, trace)
                return ev.Executed(DraftResult(work.group, work.round, (), error))
        raise AssertionError(f"the device answered work that nobody gave: {answer}")

    def hear(self, message: Message) -> None:
        if self.settings.check_page_table and isinstance(message, Propose) and self._mapped is not None:
            for row in message.rows:
                if fault := self._mapped.page_table_fault(row):
                    self.log.error("page table of round %d: %s", message.round, fault)
        super().hear(message)

    def carry_out(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.SendTarget(message):
                if self._target is not None:
                    self._target.send(message)
            case ev.Attach(configure):
                self._attach(configure)
            case ev.Detach():
                self._detach()
            case ev.WritePattern(nonce):
                if self._mapped is not None:
                    self._mapped.write_pattern(nonce)
            case ev.ReadPattern(draft, nonce):
                ok = self._mapped is not None and self._mapped.has_pattern(nonce)
                self.ref.post(ev.PatternRead(draft, nonce, ok))
            case _:
                super().carry_out(effect, now)

    def _attach(self, configure: ConfigureDraft) -> None:
        self._detach()
        try:
            mapped = Mapped(configure, self._drafter, Path(self.settings.shm_dir))
            self._target = DealerEndpoint(
                configure.endpoint,
                frames.identity("draft", configure.stamp.draft),
                accepts=TargetToDraft,
                on_message=super().hear,
            )
        except (HandleError, AddressError, TransportError) as error:
            self.log.error("cannot attach to the target: %s", error)
            self.ref.post(ev.Attached(configure.stamp.draft, str(error)))
            return
        self._mapped = mapped
        self._drafter.attach(mapped.shared)
        self.ref.post(ev.Attached(configure.stamp.draft))

    def _detach(self) -> None:
        self._drafter.detach()
        self._let_go()

    def _let_go(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None
        if self._mapped is not None:
            self._mapped.detach()
            self._mapped = None
