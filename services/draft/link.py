"""The draft's side of the protocol, without I/O: start-up and liveness; rounds are in `rounds`."""

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from common.actors.table import Table, everywhere
from common.messages.lifecycle import (
    ConfigureDraft,
    DraftHello,
    DraftReady,
    Heartbeat,
    Message,
    SelfTest,
    SelfTestReply,
    StartOver,
)
from common.messages.lifecycle import Refused as RefusedMessage
from common.messages.rounds import Propose, Verdict
from common.messages.stamp import Stamp
from services.draft import events as ev
from services.draft import rounds as rounds_module
from services.draft.options import DraftOptions
from services.draft.rounds import Rounds

NO_STAMP = Stamp(0, 0, 0)

STATES = ("hello", "attaching", "testing", "ready", "leaving")
HELLO, ATTACHING, TESTING, READY, LEAVING = STATES
JOINED = (ATTACHING, TESTING, READY)

TABLE = Table(
    STATES,
    {
        ev.Start: {HELLO: "say_hello"},
        ev.TimerFired: {HELLO: "say_hello", **everywhere(JOINED, "on_timer")},
        RefusedMessage: {HELLO: "note_refusal"},
        StartOver: everywhere((HELLO, *JOINED), "leave"),
        ConfigureDraft: {HELLO: "attach", READY: "answer_ready"},
        Heartbeat: everywhere(JOINED, "hear"),
        ev.Attached: {ATTACHING: "test"},
        SelfTestReply: {TESTING: "read_back"},
        ev.PatternRead: {TESTING: "finish_test"},
        Propose: {READY: "pass_to_rounds"},
        Verdict: {READY: "pass_to_rounds"},
        ev.Executed: {READY: "pass_to_rounds", LEAVING: "detach"},
    },
)


class DraftLink:
    """Keeps the draft's logs, decides what the device drafts and answers every Propose.

    profile: the Hello to introduce this process with; its incarnation is replaced by one from new_id, drawn
    again each time the link starts over. new_id gives random non-zero ids.
    """

    def __init__(self, profile: DraftHello, options: DraftOptions, new_id: Callable[[], int]) -> None:
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
        self.stamp = NO_STAMP
        self.rounds: Rounds | None = None
        self._hello = replace(self._profile, incarnation=self._new_id())
        self._configure: ConfigureDraft | None = None
        self._heard_at = self._now
        self._nonce = 0
        self._test_by = 0.0

    @property
    def incarnation(self) -> int:
        return self._hello.incarnation

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """The effects of one event, to be carried out in order. now: seconds, never going back."""
        self._effects = []
        self._now = now
        if self.rounds is not None:
            self.rounds.effects, self.rounds.now = self._effects, now
        if isinstance(event, ev.Executed):
            self.device_busy = False
        if not isinstance(event, ev.Received):
            self._dispatch(event)
        elif self._is_current(event.message):
            if not isinstance(event.message, SelfTestReply | Verdict):
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
            case ConfigureDraft():
                return message.stamp.draft == self.incarnation and self.stamp in (message.stamp, NO_STAMP)
            case RefusedMessage() | StartOver():
                return message.incarnation == self.incarnation
            case Heartbeat():
                return message.incarnation == self.incarnation and message.epoch == self.stamp.epoch
            case SelfTestReply() | Propose() | Verdict():
                return message.stamp == self.stamp
        return False

    def pass_to_rounds(self, subject: Propose | Verdict | ev.Executed | ev.TimerFired) -> None:
        """See the table of the rounds."""
        assert self.rounds is not None
        handler = rounds_module.TABLE.handler(self.rounds.state, type(subject))
        if handler is None:
            self.counters[f"dropped:{self.rounds.state}:{type(subject).__name__}"] += 1
        else:
            getattr(self.rounds, handler)(subject)

    def say_hello(self, _: ev.Start | ev.TimerFired) -> None:
        """Say Hello, and again after heartbeat_s."""
        self._effects.append(ev.SendGateway(self._hello))
        self._effects.append(ev.SetTimer("tick", self._now + self.options.heartbeat_s))

    def note_refusal(self, message: RefusedMessage) -> None:
        """Report the reason; Hello goes on."""
        self._effects.append(ev.Refused(message.reason))

    def attach(self, configure: ConfigureDraft) -> None:
        """Map the target's region."""
        self._configure = configure
        self.stamp = configure.stamp
        self.state = ATTACHING
        self._effects.append(ev.Attach(configure))

    def test(self, event: ev.Attached) -> None:
        """Write a pattern and have the target read it; say why if the region did not fit."""
        if event.draft != self.incarnation:
            self.counters["stale:Attached"] += 1
            return
        if event.error:
            self._fail(event.error)
            return
        self._nonce = self._new_id() & 0x7FFFFFFF
        self._test_by = self._now + self.options.self_test_s
        self.state = TESTING
        self._effects.append(ev.WritePattern(self._nonce))
        self._effects.append(ev.SendTarget(SelfTest(self.stamp, self._nonce)))

    def read_back(self, reply: SelfTestReply) -> None:
        """Check the pattern that the target wrote."""
        if reply.nonce != self._nonce:
            self.counters["stale:SelfTestReply"] += 1
        elif reply.ok:
            self._effects.append(ev.ReadPattern(self.incarnation, self._nonce + 1))
        else:
            self._fail("self-test: the target did not find the draft's pattern in the shared region")

    def finish_test(self, event: ev.PatternRead) -> None:
        """Say DraftReady and take rounds, or say why not."""
        if event.draft != self.incarnation:
            self.counters["stale:PatternRead"] += 1
        elif event.ok:
            assert self._configure is not None
            self.state = READY
            has_state = self._profile.kv_bytes_per_position > 0
            self.rounds = Rounds(self._configure, has_state, self.options.join_s, self.counters)
            self.answer_ready(self._configure)
        else:
            self._fail("self-test: the draft did not find the target's pattern in the shared region")

    def answer_ready(self, _: ConfigureDraft) -> None:
        """The answer was lost: give it again."""
        self._effects.append(ev.SendGateway(DraftReady(self.stamp)))

    def _fail(self, reason: str) -> None:
        self._effects.append(ev.SendGateway(DraftReady(self.stamp, error=reason)))
        self._effects.append(ev.Refused(reason))
        self._start_over()

    def hear(self, _: Heartbeat) -> None:
        """The gateway lives, as every message of it shows."""

    def leave(self, _: StartOver) -> None:
        """Detach and start over, once the device is done."""
        self._start_over()

    def _start_over(self) -> None:
        if self.device_busy:
            self.state = LEAVING
            return
        if self._configure is not None:
            self._effects.append(ev.Detach())
        self._reset()
        self.say_hello(ev.Start())

    def detach(self, _: ev.Executed) -> None:
        """The device is done: detach and start over."""
        self._start_over()

    def on_timer(self, event: ev.TimerFired) -> None:
        """tick: heartbeat, SelfTest again, or start over when the gateway or the test is silent too long. Any
        other: pass_to_rounds."""
        if event.name == "tick":
            self._tick()
        elif self.state == READY:
            self.pass_to_rounds(event)

    def _tick(self) -> None:
        if self._now - self._heard_at >= self.options.silence_s:
            self.counters["gateway_silent"] += 1
            self._start_over()
            return
        if self.state == TESTING:
            if self._now >= self._test_by:
                self._fail("self-test: no answer from the target")
                return
            self._effects.append(ev.SendTarget(SelfTest(self.stamp, self._nonce)))
        finished = self.rounds.finished if self.rounds is not None else 0
        beat = Heartbeat(self.stamp.epoch, self.incarnation, finished, self.device_busy)
        self._effects.append(ev.SendGateway(beat))
        self._effects.append(ev.SetTimer("tick", self._now + self.options.heartbeat_s))
