"""The target's side of the protocol, without I/O: start-up, liveness and the draft; rounds are in
`rounds`."""

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from common.actors.table import Table, everywhere
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
from common.messages.rounds import Proposal, Verify
from common.messages.stamp import Stamp
from services.target import events as ev
from services.target import rounds as rounds_module
from services.target.options import TargetOptions
from services.target.rounds import Rounds
from services.target.slots import Slots

HELLO, ALLOCATING, SERVING = STATES = ("hello", "allocating", "serving")

TABLE = Table(
    STATES,
    {
        ev.Start: {HELLO: "say_hello"},
        ev.TimerFired: {HELLO: "say_hello", ALLOCATING: "beat", SERVING: "on_timer"},
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
        ev.Executed: {HELLO: "discard_result", ALLOCATING: "discard_result", SERVING: "pass_to_rounds"},
    },
)


class TargetLink:
    """Owns slots, pages, KV lengths and the copies of logs that commits brought; one round at a time.

    profile: the Hello to introduce this process with; its incarnation is replaced by one from new_id, drawn
    again each time the link starts over. new_id gives random non-zero ids.
    """

    def __init__(self, profile: TargetHello, options: TargetOptions, new_id: Callable[[], int]) -> None:
        self.options = options
        self.counters: Counter[str] = Counter()
        self.device_busy = False
        self._profile = profile
        self._new_id = new_id
        self._effects: list[ev.Effect] = []
        self._now = 0.0
        self._reset()

    def _reset(self) -> None:
        self.state = HELLO
        self.epoch = 0
        self.draft = 0
        self.rounds: Rounds | None = None
        self._hello = replace(self._profile, incarnation=self._new_id())
        self._configure: Configure | None = None
        self._endpoint = ""
        self._manifest = b""
        self._gone_drafts: set[int] = set()
        self._heard_at = self._now

    @property
    def incarnation(self) -> int:
        return self._hello.incarnation

    @property
    def slots(self) -> Slots | None:
        """None until configured."""
        return self.rounds.slots if self.rounds is not None else None

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """The effects of one event, to be carried out in order. now: seconds, never going back."""
        self._effects = []
        self._now = now
        if self.rounds is not None:
            self.rounds.effects, self.rounds.now = self._effects, now
        if not isinstance(event, ev.Received):
            self._dispatch(event)
        elif self._is_current(event.message):
            if not isinstance(event.message, Proposal | SelfTest):
                self._heard_at = now
            self._dispatch(event.message)
        else:
            self.counters[f"stale:{type(event.message).__name__}"] += 1
        if any(isinstance(effect, ev.Run) for effect in self._effects):
            self.device_busy = True
        return self._effects

    def _dispatch(self, subject: object) -> None:
        handler = TABLE.handler(self.state, type(subject))
        if handler is None:
            self.counters[f"dropped:{self.state}:{type(subject).__name__}"] += 1
        else:
            getattr(self, handler)(subject)

    def _is_current(self, message: Message) -> bool:
        match message:
            case Configure():
                return message.target == self.incarnation and self.epoch in (0, message.epoch)
            case RefusedMessage() | StartOver():
                return message.incarnation == self.incarnation
            case Heartbeat():
                return message.incarnation == self.incarnation and message.epoch == self.epoch
            case JoinDraft() | DraftGone() | Verify():
                return message.stamp.epoch == self.epoch and message.stamp.target == self.incarnation
            case SelfTest() | Proposal():
                return bool(self.draft) and message.stamp == self._stamp
        return False

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.epoch, self.incarnation, self.draft)

    def pass_to_rounds(self, subject: Verify | Proposal | ev.Executed | ev.TimerFired) -> None:
        """See the table of the rounds."""
        assert self.rounds is not None
        if isinstance(subject, ev.Executed):
            self.device_busy = False
        handler = rounds_module.TABLE.handler(self.rounds.state, type(subject))
        if handler is None:
            self.counters[f"dropped:{self.rounds.state}:{type(subject).__name__}"] += 1
        else:
            getattr(self.rounds, handler)(subject)

    # Start-up and liveness

    def say_hello(self, _: ev.Start | ev.TimerFired) -> None:
        """Say Hello, and again after heartbeat_s."""
        self._effects.append(ev.SendGateway(self._hello))
        self._effects.append(ev.SetTimer("tick", self._now + self.options.heartbeat_s))

    def note_refusal(self, message: RefusedMessage) -> None:
        """Report the reason; Hello goes on."""
        self._effects.append(ev.Refused(message.reason))

    def take_configuration(self, configure: Configure) -> None:
        """Ask for the pool, once the device is done with work of an earlier configuration."""
        self._configure = configure
        if self.device_busy:
            return
        self.epoch = configure.epoch
        self.state = ALLOCATING
        self._effects.append(ev.AllocatePool(configure))

    def discard_result(self, _: ev.Executed) -> None:
        """The result belongs to a configuration that is over: drop it; the pool may now be made."""
        self.device_busy = False
        if self.state == HELLO and self._configure is not None:
            self.take_configuration(self._configure)

    def open_pool(self, event: ev.PoolReady) -> None:
        """Answer Configured and take rounds; on an error say it and start over."""
        if event.target != self.incarnation or self._configure is None:
            self.counters["stale:PoolReady"] += 1
            return
        if event.error:
            answer = Configured(self.epoch, self.incarnation, "", error=event.error)
            self._effects.append(ev.SendGateway(answer))
            self._start_over()
            return
        self._endpoint = event.endpoint
        self.state = SERVING
        self.rounds = Rounds(
            self._configure, self._stamp, self._profile.vocab_size, self.options.join_s, self.counters
        )
        self.answer_configured(self._configure)

    def answer_configured(self, _: Configure) -> None:
        """The answer was lost: give it again."""
        self._effects.append(ev.SendGateway(Configured(self.epoch, self.incarnation, self._endpoint)))

    def hear(self, _: Heartbeat) -> None:
        """The gateway lives, as every message of it shows."""

    def beat(self, _: ev.TimerFired) -> None:
        """Send a heartbeat; start over if the gateway has been silent for silence_s."""
        if self._now - self._heard_at >= self.options.silence_s:
            self.counters["gateway_silent"] += 1
            self._start_over()
            return
        finished = self.rounds.finished if self.rounds is not None else 0
        beat = Heartbeat(self.epoch, self.incarnation, finished, self.device_busy)
        self._effects.append(ev.SendGateway(beat))
        self._effects.append(ev.SetTimer("tick", self._now + self.options.heartbeat_s))

    def on_timer(self, event: ev.TimerFired) -> None:
        """tick: beat. Any other: pass_to_rounds."""
        if event.name == "tick":
            self.beat(event)
        else:
            self.pass_to_rounds(event)

    def leave(self, _: StartOver) -> None:
        """Start over; what the device still does is dropped when it is done."""
        self._start_over()

    def _start_over(self) -> None:
        if self.draft:
            self._effects.append(ev.FreeDraft(self.draft))
        self._reset()
        self.say_hello(ev.Start())

    # The draft

    def join_draft(self, message: JoinDraft) -> None:
        """Ask for the draft's region in place of any earlier draft's, or answer again."""
        assert self.rounds is not None
        draft = message.stamp.draft
        if draft in self._gone_drafts or draft == 0:
            self.counters["stale:JoinDraft"] += 1
        elif draft != self.draft:
            self._lose_draft()
            self.draft = draft
            self.rounds.draft_joins(self._stamp)
            self._effects.append(ev.AllocateDraft(draft, message.kv_bytes_per_position))
        elif self._manifest:
            self._effects.append(ev.SendGateway(DraftRegion(self._stamp, self._manifest)))

    def offer_region(self, event: ev.RegionReady) -> None:
        """Export every slot's pages into the new region and offer its manifest."""
        assert self.rounds is not None
        if event.draft != self.draft:
            self.counters["stale:RegionReady"] += 1
            return
        if event.error:
            self._effects.append(ev.SendGateway(DraftRegion(self._stamp, b"", error=event.error)))
            self._lose_draft()
            return
        self._manifest = event.manifest
        self.rounds.export_all()
        self._effects.append(ev.SendGateway(DraftRegion(self._stamp, self._manifest)))

    def test_region(self, message: SelfTest) -> None:
        """Have the draft's pattern read back."""
        self._effects.append(ev.TestRegion(self.draft, message.nonce))

    def answer_self_test(self, event: ev.RegionTested) -> None:
        """Answer; after a good test verdicts go to the draft and its slots' pages wait for it."""
        assert self.rounds is not None
        if event.draft != self.draft:
            self.counters["stale:RegionTested"] += 1
            return
        self.rounds.draft_tested |= event.ok
        self._effects.append(ev.SendDraft(self.draft, SelfTestReply(self._stamp, event.nonce, event.ok)))

    def drop_draft(self, message: DraftGone) -> None:
        """Free the draft's region and the pages that waited for it; do not wait for its proposal."""
        self._gone_drafts.add(message.stamp.draft)
        if message.stamp.draft == self.draft:
            self._lose_draft()

    def _lose_draft(self) -> None:
        if not self.draft or self.rounds is None:
            return
        self._effects.append(ev.FreeDraft(self.draft))
        self._gone_drafts.add(self.draft)
        self.draft = 0
        self._manifest = b""
        self.rounds.draft_gone(self._stamp)
