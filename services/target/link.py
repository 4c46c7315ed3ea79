"""The target's side of the protocol, without I/O: start-up and the draft; rounds are in `rounds`."""

from collections.abc import Callable

from msgspec.structs import replace

from common.actors.table import Table, everywhere
from common.link.link import ServiceLink
from common.messages.lifecycle import (
    Configure,
    Configured,
    DraftGone,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    Message,
    SelfTest,
    SelfTestReply,
    StartOver,
    TargetHello,
)
from common.messages.lifecycle import Refused as RefusedMessage
from common.messages.rounds import Consumed, Proposal, Verify
from common.messages.stamp import Stamp
from services.target import events as ev
from services.target.groups import Groups
from services.target.options import TargetOptions
from services.target.slots import Slots
from services.target.work import RoundResult

HELLO, ALLOCATING, SERVING = STATES = ("hello", "allocating", "serving")

TABLE = Table(
    STATES,
    {
        ev.Start: {HELLO: "say_hello"},
        ev.TimerFired: {HELLO: "say_hello", ALLOCATING: "on_timer", SERVING: "on_timer"},
        Configure: {HELLO: "take_configuration", SERVING: "answer_configured"},
        RefusedMessage: {HELLO: "note_refusal"},
        StartOver: everywhere(STATES, "leave"),
        Heartbeat: {ALLOCATING: "hear", SERVING: "hear"},
        ev.PoolReady: {ALLOCATING: "open_pool"},
        JoinDraft: {SERVING: "join_draft"},
        ev.RegionReady: {SERVING: "offer_region"},
        SelfTest: {SERVING: "test_region"},
        ev.RegionTested: {SERVING: "answer_self_test"},
        DraftGone: {SERVING: "drop_draft"},
        Verify: {SERVING: "pass_to_rounds"},
        Proposal: {SERVING: "pass_to_rounds"},
        Consumed: {SERVING: "pass_to_rounds"},
        ev.Executed: {HELLO: "discard_result", ALLOCATING: "discard_result", SERVING: "pass_to_rounds"},
    },
)


class TargetLink(ServiceLink[ev.Event, ev.Effect, Groups]):
    """Owns slots, pages, KV lengths and the copies of logs that commits brought; one round of a group at a
    time."""

    table = TABLE
    hello_state = HELLO
    from_peer = (Proposal, Consumed, SelfTest)
    options: TargetOptions

    def __init__(self, profile: TargetHello, options: TargetOptions, new_id: Callable[[], int]) -> None:
        super().__init__(profile, options, new_id)

    def _reset(self) -> None:
        super()._reset()
        self._configure: Configure | None = None
        self._endpoint = ""
        self._manifest = b""
        self._gone_drafts: set[int] = set()

    @property
    def draft(self) -> int:
        """Incarnation of the draft that a region is held for, or 0."""
        return self.stamp.draft

    @property
    def slots(self) -> Slots | None:
        """None until configured."""
        return self.groups.slots if self.groups is not None else None

    def _is_current(self, message: Message) -> bool:
        match message:
            case Configure():
                return message.target == self.incarnation and self.epoch in (0, message.epoch)
            case RefusedMessage() | StartOver() | Heartbeat():
                return self.is_for_this_incarnation(message)
            case JoinDraft() | DraftGone() | Verify():
                return message.stamp.epoch == self.epoch and message.stamp.target == self.incarnation
            case SelfTest() | Proposal() | Consumed():
                return bool(self.draft) and message.stamp == self.stamp
        return False

    # Start-up

    def take_configuration(self, configure: Configure) -> None:
        """Ask for the pool, once the device is done with work of an earlier configuration."""
        self._configure = configure
        if self.device_busy:
            return
        self.stamp = Stamp(configure.epoch, self.incarnation, 0)
        self.state = ALLOCATING
        self.effects.append(ev.AllocatePool(configure))

    def discard_result(self, _: ev.Executed[RoundResult]) -> None:
        """The result belongs to a configuration that is over: drop it; the pool may now be made."""
        if self.state == HELLO and self._configure is not None:
            self.take_configuration(self._configure)

    def open_pool(self, event: ev.PoolReady) -> None:
        """Answer Configured and take rounds; on an error say it and start over."""
        if event.target != self.incarnation or self._configure is None:
            self.count_stale(event)
            return
        if event.error:
            answer = Configured(self.epoch, self.incarnation, "", error=event.error)
            self.effects.append(ev.SendGateway(answer))
            self._start_over()
            return
        self._endpoint = event.endpoint
        self.state = SERVING
        self.groups = Groups(
            self._configure, self.stamp, self._profile.vocab_size, self.options.join_s, self.counters
        )
        self.answer_configured(self._configure)

    def answer_configured(self, _: Configure) -> None:
        """The answer was lost: give it again."""
        self.effects.append(ev.SendGateway(Configured(self.epoch, self.incarnation, self._endpoint)))

    def _start_over(self) -> None:
        if self.draft:
            self.effects.append(ev.FreeDraft(self.draft))
        super()._start_over()

    # The draft

    def join_draft(self, message: JoinDraft) -> None:
        """Ask for the draft's region in place of any earlier draft's, or answer again."""
        assert self.groups is not None
        draft = message.stamp.draft
        if draft in self._gone_drafts or draft == 0:
            self.count_stale(message)
        elif draft != self.draft:
            self._lose_draft()
            self.stamp = replace(self.stamp, draft=draft)
            self.groups.draft_joins(self.stamp, message.capture)
            self.effects.append(ev.AllocateDraft(message))
        elif self._manifest:
            self.effects.append(ev.SendGateway(DraftRegion(self.stamp, self._manifest)))

    def offer_region(self, event: ev.RegionReady) -> None:
        """Export every slot's pages into the new region and offer its manifest."""
        assert self.groups is not None
        if event.draft != self.draft:
            self.count_stale(event)
            return
        if event.error:
            self.effects.append(ev.SendGateway(DraftRegion(self.stamp, b"", error=event.error)))
            self._lose_draft()
            return
        self._manifest = event.manifest
        self.groups.export_all()
        self.effects.append(ev.SendGateway(DraftRegion(self.stamp, self._manifest)))

    def test_region(self, message: SelfTest) -> None:
        """Have the draft's pattern read back."""
        self.effects.append(ev.TestRegion(self.draft, message.nonce))

    def answer_self_test(self, event: ev.RegionTested) -> None:
        """Answer; after a good test verdicts go to the draft and its slots' pages wait for it."""
        assert self.groups is not None
        if event.draft != self.draft:
            self.count_stale(event)
            return
        if event.ok:
            self.groups.draft_passes()
        self.effects.append(ev.SendDraft(self.draft, SelfTestReply(self.stamp, event.nonce, event.ok)))

    def drop_draft(self, message: DraftGone) -> None:
        """Free the draft's region and the pages that waited for it; do not wait for its proposal."""
        self._gone_drafts.add(message.stamp.draft)
        if message.stamp.draft == self.draft:
            self._lose_draft()

    def _lose_draft(self) -> None:
        if not self.draft or self.groups is None:
            return
        self.effects.append(ev.FreeDraft(self.draft))
        self._gone_drafts.add(self.draft)
        self.stamp = replace(self.stamp, draft=0)
        self._manifest = b""
        self.groups.draft_gone(self.stamp)
