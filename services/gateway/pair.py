"""Start-up, return and liveness of the two services, as the gateway drives them."""

from collections import Counter
from collections.abc import Callable

from common.actors.table import Table, everywhere
from common.messages.lifecycle import (
    Configure,
    Configured,
    ConfigureDraft,
    DraftGone,
    DraftHello,
    DraftReady,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    Message,
    Refused,
    StartOver,
    TargetHello,
)
from common.messages.stamp import Stamp
from services.gateway import events as ev
from services.gateway.options import CoordinatorOptions
from services.gateway.pairing import draft_refusal, limits_for, target_refusal
from services.gateway.schedule import Limits

ABSENT = "absent"
HELD, CONFIGURING, SERVING = "held", "configuring", "serving"
OFFERED, JOINING, ATTACHING, READY, LEAVING = "offered", "joining", "attaching", "ready", "leaving"
TARGET_STATES = (ABSENT, HELD, CONFIGURING, SERVING)
DRAFT_STATES = (ABSENT, OFFERED, JOINING, ATTACHING, READY, LEAVING)

TARGET_TABLE = Table(
    TARGET_STATES,
    {
        TargetHello: everywhere(TARGET_STATES, "meet_target"),
        Configured: {CONFIGURING: "open_target"},
        Heartbeat: everywhere(TARGET_STATES, "hear_target"),
    },
)

DRAFT_TABLE = Table(
    DRAFT_STATES,
    {
        DraftHello: everywhere(DRAFT_STATES, "meet_draft"),
        DraftRegion: {JOINING: "configure_draft"},
        DraftReady: {ATTACHING: "open_draft"},
        Heartbeat: everywhere(DRAFT_STATES, "hear_draft"),
    },
)


class Pair:
    """Which target and which draft the gateway works with. Effects go to the list that the Coordinator gives.

    in_flight: whether some request has committed tokens and has not ended.
    """

    def __init__(
        self, options: CoordinatorOptions, epoch: int, counters: Counter[str], in_flight: Callable[[], bool]
    ) -> None:
        self.options = options
        self.epoch = epoch
        self.counters = counters
        self.effects: list[ev.Effect] = []
        self.now = 0.0
        self.target_state = ABSENT
        self.draft_state = ABSENT
        self.target: TargetHello | None = None
        self.draft: DraftHello | None = None
        self.limits: Limits | None = None
        self.rounds = 0
        self.draft_beat: Heartbeat | None = None
        self.resident_bytes: dict[str, int] = {}
        self._in_flight = in_flight
        self._configure: Configure | None = None
        self._endpoint = ""
        self._manifest = b""
        self._last_served: TargetHello | None = None
        self._gone: set[int] = set()
        self._refused: set[tuple[int, str]] = set()
        self._ticked_at = 0.0
        self._target_heard = 0.0
        self._draft_heard = 0.0
        self._draft_moved = 0.0
        self._leave_by = 0.0

    @property
    def serving(self) -> int:
        """Incarnation of the target that rounds may be sent to, or 0."""
        return self.target.incarnation if self.target and self.target_state == SERVING else 0

    @property
    def drafting(self) -> int:
        """Incarnation of the draft that rounds may be sent to, or 0."""
        return self.draft.incarnation if self.draft and self.draft_state == READY and self.serving else 0

    @property
    def stamp(self) -> Stamp:
        draft = (
            self.draft.incarnation if self.draft and self.draft_state in (JOINING, ATTACHING, READY) else 0
        )
        return Stamp(self.epoch, self.target.incarnation if self.target else 0, draft)

    def dispatch(self, table: Table, message: Message) -> None:
        state = self.target_state if table is TARGET_TABLE else self.draft_state
        table.dispatch(self, state, message, self.counters)

    def _send(self, peer: ev.Peer, message: Message) -> None:
        self.effects.append(ev.Send(peer, message))

    def _stale(self, message: Message) -> None:
        self.counters[f"stale:{type(message).__name__}"] += 1

    def _give_up(self, peer: ev.Peer, message: TargetHello | DraftHello | Heartbeat) -> None:
        self._stale(message)
        self._send(peer, StartOver(self.epoch, message.incarnation))

    # Target

    def meet_target(self, hello: TargetHello) -> None:
        """Refuse it by name, or configure it: at once, or after the draft has left the target before it. A
        new incarnation ends the one before."""
        if self.target is not None and hello.incarnation == self.target.incarnation:
            self._target_heard = self.now
            return
        if hello.incarnation in self._gone:
            self._give_up("target", hello)
            return
        limits = limits_for(hello, self.options)
        before = self._last_served if self._in_flight() else None
        reason = target_refusal(hello, before, self.options.tokenizer)
        if isinstance(limits, str) or reason:
            self._refuse("target", hello.incarnation, reason or str(limits))
            return
        self.lose_target(f"{hello.model} on {hello.device} said Hello as a new incarnation")
        self.target = hello
        self.limits = limits
        self._target_heard = self.now
        self._configure = Configure(
            self.epoch,
            hello.incarnation,
            limits.pages,
            limits.page_size,
            2 * self.options.max_num_seqs + 1,
            limits.max_model_len,
            limits.max_nodes,
            self.options.groups,
        )
        self.target_state = HELD
        self._configure_held()

    def _refuse(self, peer: ev.Peer, incarnation: int, reason: str) -> None:
        self._send(peer, Refused(self.epoch, incarnation, reason))
        if (incarnation, reason) not in self._refused:
            self._refused.add((incarnation, reason))
            self.effects.append(ev.PeerRefused(peer, reason))

    def _configure_held(self) -> None:
        if self.target_state == HELD and self.draft_state != LEAVING and self._configure is not None:
            self.target_state = CONFIGURING
            self._send("target", self._configure)

    def open_target(self, message: Configured) -> None:
        """The target serves: rounds may start, and a draft that said Hello may join."""
        assert self.target is not None
        assert self.limits is not None
        if message.epoch != self.epoch or message.target != self.target.incarnation:
            self._stale(message)
            return
        self._target_heard = self.now
        if message.error:
            self.lose_target(f"target could not make its page pool: {message.error}")
            return
        self._endpoint = message.endpoint
        self._last_served = self.target
        self.target_state = SERVING
        self.effects.append(ev.TargetReady(self.target, self.limits.pages, self.limits.max_model_len))
        if self.draft_state == OFFERED:
            self._join()

    def hear_target(self, message: Heartbeat) -> None:
        """The target lives. One that was given up is told to start over."""
        if message.epoch == self.epoch and self.target and message.incarnation == self.target.incarnation:
            self._target_heard = self.now
            self.resident_bytes["target"] = message.resident_bytes
        else:
            self._give_up("target", message)

    def heard_verdict(self, draft: int) -> None:
        """A current verdict came. It names the draft that the target holds: one that is lost is said to be
        gone again."""
        self._target_heard = self.now
        if draft in self._gone:
            assert self.target is not None
            self._send("target", DraftGone(Stamp(self.epoch, self.target.incarnation, draft)))

    def lose_target(self, reason: str) -> None:
        """The target is gone; a draft that was joined to it has to detach before the next one is
        configured."""
        if self.target is None:
            return
        self._gone.add(self.target.incarnation)
        self._send("target", StartOver(self.epoch, self.target.incarnation))
        self.effects.append(ev.TargetLost(reason))
        if self.draft_state in (JOINING, ATTACHING, READY):
            assert self.draft is not None
            self.effects.append(ev.DraftLost("its target is gone"))
            self._gone.add(self.draft.incarnation)
            self.draft_state = LEAVING
            self._leave_by = self.now + self.options.silence_s
            self._send("draft", StartOver(self.epoch, self.draft.incarnation))
        self.target = None
        self.resident_bytes.pop("target", None)
        self.limits = None
        self._configure = None
        self.target_state = ABSENT

    # Draft

    def meet_draft(self, hello: DraftHello) -> None:
        """Refuse it by name, or have it join the target, now or when there is one. A new incarnation ends the
        one before, which has detached."""
        if self.draft is not None and hello.incarnation == self.draft.incarnation:
            self._draft_heard = self.now
            return
        if hello.incarnation in self._gone:
            self._give_up("draft", hello)
            return
        if reason := draft_refusal(hello, self.target if self.target_state == SERVING else None):
            self._refuse("draft", hello.incarnation, reason)
            return
        self.lose_draft(f"{hello.drafter} on {hello.device} said Hello as a new incarnation")
        self.draft = hello
        self.draft_state = OFFERED
        self._draft_heard = self.now
        self._configure_held()
        if self.target_state == SERVING:
            self._join()

    def _join(self) -> None:
        assert self.target is not None
        assert self.draft is not None
        draft, target = self.draft, self.target
        if reason := draft_refusal(draft, target):
            self.draft, self.draft_state = None, ABSENT
            self._refuse("draft", draft.incarnation, reason)
            return
        self.draft_state = JOINING
        self._draft_moved = self.now
        self.draft_beat = None
        self._send_join(draft)

    def _send_join(self, draft: DraftHello) -> None:
        self._send(
            "target",
            JoinDraft(self.stamp, draft.kv_bytes_per_position, draft.capture, draft.hidden_row_bytes),
        )

    def configure_draft(self, message: DraftRegion) -> None:
        """The region is there: pass its manifest on to the draft."""
        if message.stamp != self.stamp:
            self._stale(message)
            return
        self._target_heard = self.now
        if message.error:
            self.lose_draft(f"the target could not make the draft's region: {message.error}")
            return
        self._manifest = message.manifest
        self.draft_state = ATTACHING
        self._send_configure_draft()

    def _send_configure_draft(self) -> None:
        assert self._configure is not None
        configure = self._configure
        self._send(
            "draft",
            ConfigureDraft(
                self.stamp,
                self._endpoint,
                self._manifest,
                configure.pages,
                configure.page_size,
                configure.slots,
                configure.max_model_len,
                configure.max_nodes,
                configure.groups,
            ),
        )

    def open_draft(self, message: DraftReady) -> None:
        """The draft is attached and tested: drafting begins with the next round."""
        if message.stamp != self.stamp:
            self._stale(message)
            return
        assert self.draft is not None
        self._draft_heard = self.now
        if message.error:
            self.lose_draft(f"draft {self.draft.drafter}: {message.error}")
            return
        self.draft_state = READY
        self._draft_moved = self.now
        self.effects.append(ev.DraftJoined(self.draft.drafter))

    def hear_draft(self, message: Heartbeat) -> None:
        """The draft lives, and moves if it finished work or has none. One that was given up is told to start
        over."""
        if message.epoch != self.epoch or message.incarnation in self._gone or self.draft is None:
            self._give_up("draft", message)
            return
        self._draft_heard = self.now
        self.resident_bytes["draft"] = message.resident_bytes
        before = self.draft_beat
        if not message.busy or before is None or message.rounds > before.rounds:
            self._draft_moved = self.now
        self.draft_beat = message

    def lose_draft(self, reason: str) -> None:
        """The draft is gone: the target may free what waits for it."""
        if self.draft is None:
            return
        self._gone.add(self.draft.incarnation)
        if self.draft_state in (JOINING, ATTACHING, READY):
            self._send("target", DraftGone(self.stamp))
            self._send("draft", StartOver(self.epoch, self.draft.incarnation))
            self.effects.append(ev.DraftLost(reason))
        self.draft = None
        self.resident_bytes.pop("draft", None)
        self.draft_state = ABSENT
        self._configure_held()

    # Time

    def _forgive_own_absence(self) -> None:
        """Nobody could be heard while this process did not run."""
        late = self.now - self._ticked_at - self.options.heartbeat_s
        self._ticked_at = self.now
        if late > self.options.heartbeat_s:
            self._target_heard += late
            self._draft_heard += late
            self._draft_moved += late

    def tick(self) -> None:
        """Once per heartbeat_s: give up who is silent or stuck, repeat what has no answer, send
        heartbeats."""
        options = self.options
        self._forgive_own_absence()
        if self.target is not None and self.now - self._target_heard >= options.silence_s:
            self.lose_target(f"target was silent for {options.silence_s:g} s")
        if self.draft is not None:
            if self.draft_state == LEAVING:
                if self.now >= self._leave_by:
                    self.lose_draft("draft did not detach")
            elif self.now - self._draft_heard >= options.silence_s:
                self.lose_draft(f"draft was silent for {options.silence_s:g} s")
            elif self.draft_state == READY and self.now - self._draft_moved >= options.draft_stuck_s:
                self.lose_draft(f"draft finished no work for {options.draft_stuck_s:g} s")
        if self.target is not None:
            if self.target_state == CONFIGURING and self._configure is not None:
                self._send("target", self._configure)
            self._send("target", Heartbeat(self.epoch, self.target.incarnation, self.rounds, False))
        if self.draft is not None:
            if self.draft_state == JOINING:
                self._send_join(self.draft)
            elif self.draft_state == ATTACHING:
                self._send_configure_draft()
            elif self.draft_state == LEAVING:
                self._send("draft", StartOver(self.epoch, self.draft.incarnation))
            if self.draft_state in (JOINING, ATTACHING, READY):
                self._send("draft", Heartbeat(self.epoch, self.draft.incarnation, self.rounds, False))
