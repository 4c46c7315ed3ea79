"""The gateway's side of the round protocol, without I/O: it owns every log, and gives each event to the part
that it concerns."""

from collections import Counter
from collections.abc import Callable, Mapping

from common.messages.lifecycle import Heartbeat, Message
from common.messages.rounds import Behind, Verdict
from services.gateway import events as ev
from services.gateway.group import Group, Shared
from services.gateway.lifetimes import Lifetimes
from services.gateway.options import CoordinatorOptions, KController
from services.gateway.pair import DRAFT_TABLE, TARGET_TABLE, Pair
from services.gateway.requests import LIVE
from services.gateway.usage import Usage


class Coordinator:
    """Drives the rounds of every group over the pair of services.

    controller chooses k. new_id gives random non-zero ids. groups: by number.
    """

    def __init__(
        self, options: CoordinatorOptions, controller: KController, new_id: Callable[[], int]
    ) -> None:
        self.options = options
        self.counters: Counter[str] = Counter()
        self.usage = Usage()
        self._pair = Pair(options, new_id(), self.counters, self._in_flight)
        self._lifetimes = Lifetimes(options, self._pair)
        self.requests = self._lifetimes.requests
        self._shared = Shared(options, controller, self._pair, self._lifetimes, self.usage, self.counters)
        self.groups = self._shared.groups
        self.groups += [Group(number, self._shared) for number in range(options.groups)]
        self._effects: list[ev.Effect] = []
        self._now = 0.0
        self._away_since = 0.0
        self._first = 0

    @property
    def epoch(self) -> int:
        return self._pair.epoch

    @property
    def target(self) -> int:
        """Incarnation of the target that has the rounds, or 0."""
        return self._shared.target

    @property
    def target_ready(self) -> bool:
        return self._pair.serving != 0

    @property
    def draft_ready(self) -> bool:
        return self._pair.drafting != 0

    @property
    def free_pages(self) -> int:
        return self._shared.free_pages

    @property
    def retiring_pages(self) -> int:
        return self._shared.retiring_pages

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """By service, as its last heartbeat said."""
        return self._pair.resident_bytes

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """The effects of one event, to be carried out in order. now: seconds, never going back."""
        effects: list[ev.Effect] = []
        self._effects, self._now = effects, now
        self._pair.effects, self._pair.now = effects, now
        self._lifetimes.effects = effects
        for group in self.groups:
            group.effects, group.now = effects, now
        match event:
            case ev.Start():
                self._away_since = now
                self._set_tick()
            case ev.Submit():
                self._lifetimes.submit(event)
                self._wake_all()
            case ev.Abort():
                self._lifetimes.abort(event)
                self._wake_all()
            case ev.Received():
                self._receive(event.peer, event.message)
            case ev.PeerLost():
                lose = self._pair.lose_target if event.peer == "target" else self._pair.lose_draft
                lose(event.reason)
            case ev.TimerFired(name="tick"):
                self._tick()
            case ev.TimerFired(name=name):
                self.groups[int(name.rpartition(":")[2])].dispatch(event)
        self._follow_pair()
        self._start_rounds()
        self.usage.rounds_are(bool(self._shared.outstanding), now)
        return effects

    def _receive(self, peer: ev.Peer, message: Message) -> None:
        kind = type(message)
        if isinstance(message, Verdict):
            self._pass_verdict(message)
        elif isinstance(message, Behind):
            self._rewind_draft(message)
        elif peer == "target" and kind in TARGET_TABLE.events:
            self._pair.dispatch(TARGET_TABLE, message)
        elif kind in DRAFT_TABLE.events:
            self._pair.dispatch(DRAFT_TABLE, message)
            if isinstance(message, Heartbeat) and message is self._pair.draft_beat:
                self.usage.draft_beats(message)
        else:
            self.counters[f"unexpected:{kind.__name__}"] += 1

    def _pass_verdict(self, verdict: Verdict) -> None:
        if 0 <= verdict.group < len(self.groups):
            self.groups[verdict.group].dispatch(verdict)
        else:
            self.counters["no_group:Verdict"] += 1

    def _rewind_draft(self, message: Behind) -> None:
        """The draft missed commits: the next Propose sends again from what it has."""
        if message.stamp != self._pair.stamp or not self._shared.draft:
            self.counters["stale:Behind"] += 1
            return
        for number, have in message.rows:
            request = self.requests.by_id.get(number)
            if request is not None and request.state == LIVE:
                request.draft_len = max(0, min(have, request.draft_len))

    def _in_flight(self) -> bool:
        return any(one.generated for one in self.requests.by_id.values())

    def _wake_all(self) -> None:
        for group in self.groups:
            group.wake()

    def _set_tick(self) -> None:
        self._effects.append(ev.SetTimer("tick", self._now + self.options.heartbeat_s))

    def _tick(self) -> None:
        self._pair.tick()
        self.usage.sample(self._now)
        self._set_tick()
        if not self._shared.target and self._now - self._away_since >= self.options.return_s:
            self._lifetimes.fail_all(f"no target has served for {self.options.return_s:g} s")

    def _follow_pair(self) -> None:
        pair, shared = self._pair, self._shared
        if pair.serving != shared.target:
            if shared.target:
                self._lifetimes.replay_all(
                    frozenset().union(*(round_.working for round_ in shared.outstanding))
                )
                self._away_since = self._now
            shared.target_changes(pair.serving, pair.limits.pages - 1 if pair.limits else 0)
            if shared.target:
                self._lifetimes.fail_all_too_long()
        if pair.drafting != shared.draft:
            shared.draft = pair.drafting
            for group in self.groups:
                group.draft_changes()
            for request in self.requests.live.values():
                request.draft_len = 0

    def _start_rounds(self) -> None:
        """The group whose round began last comes last, so that all get their turn while only one round may be
        outstanding."""
        for group in (*self.groups[self._first :], *self.groups[: self._first]):
            if group.start_if_needed():
                self._first = (group.number + 1) % len(self.groups)
