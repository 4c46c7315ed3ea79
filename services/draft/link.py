"""The draft's side of the protocol, without I/O: start-up; rounds are in `rounds`."""

from collections.abc import Callable

from common.actors.table import Table, everywhere
from common.link.link import NO_STAMP, ServiceLink
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
from services.draft import events as ev
from services.draft.groups import Groups
from services.draft.options import DraftOptions
from services.draft.work import DraftResult

STATES = ("hello", "attaching", "testing", "ready", "leaving")
HELLO, ATTACHING, TESTING, READY, LEAVING = STATES
JOINED = (ATTACHING, TESTING, READY)

TABLE = Table(
    STATES,
    {
        ev.Start: {HELLO: "say_hello"},
        ev.TimerFired: {HELLO: "say_hello", ATTACHING: "on_timer", TESTING: "test_again", READY: "on_timer"},
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


class DraftLink(ServiceLink[ev.Event, ev.Effect, Groups]):
    """Keeps the draft's logs, decides what the device drafts and answers every Propose."""

    table = TABLE
    hello_state = HELLO
    from_peer = (SelfTestReply, Verdict)
    options: DraftOptions

    def __init__(self, profile: DraftHello, options: DraftOptions, new_id: Callable[[], int]) -> None:
        super().__init__(profile, options, new_id)

    def _reset(self) -> None:
        super()._reset()
        self._configure: ConfigureDraft | None = None
        self._nonce = 0
        self._test_by = 0.0

    def _is_current(self, message: Message) -> bool:
        match message:
            case ConfigureDraft():
                return message.stamp.draft == self.incarnation and self.stamp in (message.stamp, NO_STAMP)
            case RefusedMessage() | StartOver() | Heartbeat():
                return self.is_for_this_incarnation(message)
            case SelfTestReply() | Propose() | Verdict():
                return message.stamp == self.stamp
        return False

    def attach(self, configure: ConfigureDraft) -> None:
        """Map the target's region."""
        self._configure = configure
        self.stamp = configure.stamp
        self.state = ATTACHING
        self.effects.append(ev.Attach(configure))

    def test(self, event: ev.Attached) -> None:
        """Write a pattern and have the target read it; say why if the region did not fit."""
        if event.draft != self.incarnation:
            self.count_stale(event)
            return
        if event.error:
            self._fail(event.error)
            return
        self._nonce = self._new_id() & 0x7FFFFFFF
        self._test_by = self.now + self.options.self_test_s
        self.state = TESTING
        self.effects.append(ev.WritePattern(self._nonce))
        self.effects.append(ev.SendTarget(SelfTest(self.stamp, self._nonce)))

    def test_again(self, event: ev.TimerFired) -> None:
        """tick: SelfTest again, or say why not after self_test_s without an answer. Then as on_timer."""
        if event.name == "tick" and not self.gateway_is_silent:
            if self.now >= self._test_by:
                self._fail("self-test: no answer from the target")
                return
            self.effects.append(ev.SendTarget(SelfTest(self.stamp, self._nonce)))
        self.on_timer(event)

    def read_back(self, reply: SelfTestReply) -> None:
        """Check the pattern that the target wrote."""
        if reply.nonce != self._nonce:
            self.count_stale(reply)
        elif reply.ok:
            self.effects.append(ev.ReadPattern(self.incarnation, self._nonce + 1))
        else:
            self._fail("self-test: the target did not find the draft's pattern in the shared region")

    def finish_test(self, event: ev.PatternRead) -> None:
        """Say DraftReady and take rounds, or say why not."""
        if event.draft != self.incarnation:
            self.count_stale(event)
        elif event.ok:
            assert self._configure is not None
            self.state = READY
            profile = self._profile
            assert isinstance(profile, DraftHello)
            extends_ids = profile.kv_bytes_per_position > 0 and not profile.capture
            self.groups = Groups(self._configure, extends_ids, self.options.join_s, self.counters)
            self.answer_ready(self._configure)
        else:
            self._fail("self-test: the draft did not find the target's pattern in the shared region")

    def answer_ready(self, _: ConfigureDraft) -> None:
        """The answer was lost: give it again."""
        self.effects.append(ev.SendGateway(DraftReady(self.stamp)))

    def _fail(self, reason: str) -> None:
        self.effects.append(ev.SendGateway(DraftReady(self.stamp, error=reason)))
        self.effects.append(ev.Refused(reason))
        self._start_over()

    def _start_over(self) -> None:
        if self.device_busy:
            self.state = LEAVING
            return
        if self._configure is not None:
            self.effects.append(ev.Detach())
        super()._start_over()

    def detach(self, _: ev.Executed[DraftResult]) -> None:
        """The device is done: detach and start over."""
        self._start_over()
