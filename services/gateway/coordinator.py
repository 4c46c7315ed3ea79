"""The gateway's side of the round protocol, without I/O: it owns every log and is the only place that
commits."""

from collections import Counter
from collections.abc import Callable

from common.actors.machine import Machine
from common.actors.table import Table, everywhere
from common.messages.lifecycle import Message
from common.messages.rounds import AdmitAnswer, Behind, Commit, ReleaseRow, Verdict, VerdictRow
from services.gateway import events as ev
from services.gateway.commit import commit, continues
from services.gateway.drafting import DraftPause
from services.gateway.options import CoordinatorOptions, KController
from services.gateway.pair import DRAFT_TABLE, TARGET_TABLE, Pair
from services.gateway.requests import LIVE, WAITING, Request, Requests
from services.gateway.round import Round, begin_round, propose_for, sample_of
from services.gateway.schedule import (
    choose_admissions,
    choose_workers,
    count_verify_rows,
    plan_rows,
)

MAX_STRIKES = 3
"""A request that kills the target must not do so for ever, and one that was only there must not end for it:
processes die for reasons of their own, and may die twice."""

IDLE, VERIFYING, PAUSING = STATES = ("idle", "verifying", "pausing")

ROUND_TABLE = Table(
    STATES,
    {
        ev.Submit: everywhere(STATES, "submit"),
        ev.Abort: everywhere(STATES, "abort"),
        Verdict: {VERIFYING: "take_verdict"},
        Behind: everywhere(STATES, "rewind_draft"),
        ev.TimerFired: {VERIFYING: "verify_again", PAUSING: "resume"},
    },
)


class Coordinator(Machine[ev.Effect]):
    """Drives the rounds of one group over the pair of services.

    controller chooses k. new_id gives random non-zero ids. A request ends with exactly one Finished or
    Failed.
    """

    table = ROUND_TABLE

    def __init__(
        self, options: CoordinatorOptions, controller: KController, new_id: Callable[[], int]
    ) -> None:
        super().__init__(IDLE, Counter())
        self.options = options
        self.requests = Requests()
        self.free_pages = 0
        self.retiring_pages = 0
        self._controller = controller
        self._pair = Pair(options, new_id(), self.counters, self._in_flight)
        self._drafting = DraftPause(options)
        self._away_since = 0.0
        self._target = 0
        self._draft = 0
        self._round_number = 0
        self._round: Round | None = None
        self._resend_at = 0.0
        self._resume_at = 0.0
        self._stalls = 0

    @property
    def epoch(self) -> int:
        return self._pair.epoch

    @property
    def target_ready(self) -> bool:
        return self._pair.serving != 0

    @property
    def draft_ready(self) -> bool:
        return self._pair.drafting != 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """The effects of one event, to be carried out in order. now: seconds, never going back."""
        effects: list[ev.Effect] = []
        self.effects, self.now = effects, now
        self._pair.effects, self._pair.now = effects, now
        match event:
            case ev.Start():
                self._away_since = now
                self.set_timer("tick", now + self.options.heartbeat_s)
            case ev.Received():
                self._receive(event.peer, event.message)
            case ev.PeerLost():
                lose = self._pair.lose_target if event.peer == "target" else self._pair.lose_draft
                lose(event.reason)
            case ev.TimerFired(name="tick"):
                self._tick()
            case _:
                self.dispatch(event)
        self._follow_pair()
        if self.state == IDLE and self._target:
            self._start_round_if_needed()
        return effects

    def _receive(self, peer: ev.Peer, message: Message) -> None:
        kind = type(message)
        if kind in ROUND_TABLE.events:
            self.dispatch(message)
        elif peer == "target" and kind in TARGET_TABLE.events:
            self._pair.dispatch(TARGET_TABLE, message)
        elif kind in DRAFT_TABLE.events:
            self._pair.dispatch(DRAFT_TABLE, message)
        else:
            self.counters[f"unexpected:{kind.__name__}"] += 1

    def _in_flight(self) -> bool:
        return any(one.generated for one in self.requests.by_id.values())

    # Requests come and go

    def submit(self, event: ev.Submit) -> None:
        """Queue the request, or fail it if it could never fit."""
        if event.request in self.requests.by_id:
            raise ValueError(f"request {event.request} is already here: give every request a new id")
        request = self.requests.add(
            event.request, event.prompt_ids, event.sampling, event.max_tokens, event.priority, event.sink
        )
        if not event.prompt_ids or event.max_tokens < 1:
            self._fail(request, "never_fits", "a request needs a prompt id and room for a token")
        elif self._too_long(request):
            self._fail_too_long(request)
        self._wake()

    def _too_long(self, request: Request) -> bool:
        limits = self._pair.limits
        return len(request.ids) >= (limits.max_model_len if limits else self.options.max_model_len)

    def _fail_too_long(self, request: Request) -> None:
        limits = self._pair.limits
        most = (limits.max_model_len if limits else self.options.max_model_len) - 1
        error = f"a log of {len(request.ids)} ids leaves no room for a token: the limit is {most} ids"
        self._fail(request, "never_fits", error)

    def abort(self, event: ev.Abort) -> None:
        """End the request now; its slot goes with the next round."""
        request = self.requests.by_id.get(event.request)
        if request is not None:
            self._finish(request, "abort")
            self._wake()

    def _finish(self, request: Request, reason: str) -> None:
        self.requests.remove(request)
        stats = request.stats()
        self.effects.append(
            ev.Finished(request.request, reason, stats, request.cached_tokens, request.admitted_at)
        )

    def _fail(self, request: Request, code: str, error: str) -> None:
        self.requests.remove(request)
        stats = request.stats()
        self.effects.append(
            ev.Failed(request.request, code, error, stats, request.cached_tokens, request.admitted_at)
        )

    def _wake(self) -> None:
        if self.state == PAUSING:
            self.state = IDLE

    # The pair

    def _tick(self) -> None:
        self._pair.tick()
        self.set_timer("tick", self.now + self.options.heartbeat_s)
        if not self._target and self.now - self._away_since >= self.options.return_s:
            for request in list(self.requests.by_id.values()):
                self._fail(request, "error", f"no target has served for {self.options.return_s:g} s")

    def _follow_pair(self) -> None:
        pair = self._pair
        if pair.serving != self._target:
            if self._target:
                self._replay_all()
                self._away_since = self.now
            self._target = pair.serving
            self._round_number = 0
            self._round = None
            self._stalls = 0
            self.state = IDLE
            self.retiring_pages = 0
            self.free_pages = pair.limits.pages - 1 if pair.limits else 0
            for request in [one for one in self.requests.waiting if self._target and self._too_long(one)]:
                self._fail_too_long(request)
        if pair.drafting != self._draft:
            self._draft = pair.drafting
            self._drafting = DraftPause(self.options)
            for request in self.requests.live.values():
                request.draft_len = 0

    def _replay_all(self) -> None:
        """The target is gone: every request goes back to the queue with its log; those that had work in the
        round that never ended are suspects, and end when it happens to them again and again."""
        working = self._round.working if self._round is not None else frozenset()
        self.requests.releases.clear()
        for request in list(self.requests.by_id.values()):
            if request.state != WAITING:
                self.requests.requeue(request)
        for number in sorted(working):
            if number in self.requests.by_id:
                self._strike(
                    self.requests.by_id[number],
                    f"the target was lost {MAX_STRIKES} times at the same point of this request",
                )

    def _strike(self, request: Request, error: str) -> None:
        request.strike()
        if request.strikes >= MAX_STRIKES:
            self._fail(request, "error", error)

    # A round begins

    def _start_round_if_needed(self) -> None:
        requests = self.requests
        assert self._pair.limits is not None
        admissible = requests.waiting and choose_admissions(requests, self._pair.limits, self.free_pages)
        if requests.live or requests.releases or admissible:
            self._start_round()
        elif requests.waiting or self.retiring_pages:
            self._pause()

    def _pause(self) -> None:
        pause_s = min(self.options.stall_s * 2**self._stalls, self.options.stall_max_s)
        self._stalls += 1
        self.state = PAUSING
        self._resume_at = self.now + pause_s
        self.set_timer("pause", self._resume_at)

    def resume(self, event: ev.TimerFired) -> None:
        """The pause is over: send a round, even one that asks for nothing, to learn what changed."""
        if event.name == "pause" and self.is_due(self._resume_at):
            self._start_round()

    def _start_round(self) -> None:
        limits = self._pair.limits
        assert limits is not None
        admitted = choose_admissions(self.requests, limits, self.free_pages)
        workers = choose_workers(self.requests, admitted)
        k = self._choose_k(count_verify_rows(workers), limits.max_rows, limits.max_nodes)
        plans = plan_rows(self.requests.in_order(), workers, k, limits)
        for request in admitted:
            self.requests.admit(request)
        self._round_number += 1
        releases, self.requests.releases = self.requests.releases, []
        self._round = begin_round(
            self._round_number, self._pair.stamp, k, plans, admitted, releases, self.now
        )
        if self._draft:
            self.effects.append(ev.Send("draft", propose_for(self._round.verify, plans)))
        self.state = VERIFYING
        self._send_verify()

    def _choose_k(self, verify_rows: int, max_rows: int, max_nodes: int) -> int:
        draft = self._pair.draft
        if not self._draft or draft is None or self._drafting.paused(self.now, self._pair.draft_beat):
            return 0
        k = min(self._controller.choose(verify_rows), draft.max_k, max_nodes - 1)
        return max(0, min(k, max_rows // max(1, verify_rows) - 1))

    def _send_verify(self) -> None:
        assert self._round is not None
        self.effects.append(ev.Send("target", self._round.verify))
        self._resend_at = self.now + self.options.resend_s
        self.set_timer("verify", self._resend_at)

    def verify_again(self, event: ev.TimerFired) -> None:
        """No verdict yet: send the identical Verify, or give the target up after round_timeout_s."""
        assert self._round is not None
        if event.name != "verify" or not self.is_due(self._resend_at):
            return
        if self.now - self._round.started_at >= self.options.round_timeout_s:
            self._pair.lose_target(f"target did not finish a round within {self.options.round_timeout_s:g} s")
            return
        self.counters["resent:Verify"] += 1
        self._send_verify()

    # A round ends

    def take_verdict(self, verdict: Verdict) -> None:
        """Commit what was accepted, token by token up to a stop; seat who was admitted; then the next
        round."""
        assert self._round is not None
        if not self._is_awaited(verdict):
            self.counters["stale:Verdict"] += 1
            return
        sample = sample_of(self._round, self.now)
        self._round = None
        self.state = IDLE
        self._pair.rounds += 1
        self._pair.heard_verdict(verdict.stamp.draft)
        self._controller.observe(verdict, sample)
        self._drafting.observe(verdict.draft, self.now, self._pair.draft_beat)
        self.free_pages, self.retiring_pages = verdict.free_pages, verdict.retiring_pages
        moved = [self._seat(answer) for answer in verdict.admitted]
        moved += [self._take_row(row, verdict.error) for row in verdict.rows]
        moved.append(self._make_room(verdict))
        if any(moved):
            self._stalls = 0
        elif verdict.rows or verdict.admitted:
            self._pause()

    def _is_awaited(self, verdict: Verdict) -> bool:
        assert self._round is not None
        awaited, stamp = self._round.verify, verdict.stamp
        is_current = stamp.epoch == self.epoch and stamp.target == self._target
        return is_current and verdict.round == awaited.round and verdict.group == awaited.group

    def _seat(self, answer: AdmitAnswer) -> bool:
        """True if the request moved on."""
        request = self.requests.by_id.get(answer.request)
        if request is None:
            if answer.status == "ok":
                self.requests.releases.append(
                    ReleaseRow(answer.request, answer.slot, answer.generation, Commit(0, []))
                )
            return True
        if answer.status == "ok":
            if request.admitted_at is None:
                request.admitted_at = self.now
                request.cached_tokens = answer.cached
            self.requests.go_live(request, answer)
            return True
        self.requests.requeue(request)
        self.counters[f"admission:{answer.status}"] += 1
        if answer.status == "never_fits":
            self._fail_too_long(request)
            return True
        return False

    def _take_row(self, row: VerdictRow, error: str) -> bool:
        """True if the request moved on."""
        request = self.requests.live.get(row.request)
        if request is None:
            return True
        if request.slot != row.slot or request.generation != row.generation:
            self.counters["stale:VerdictRow"] += 1
            return False
        match row.status:
            case "ok":
                return self._commit(request, row)
            case "prefilled":
                request.kv, request.allocated = row.kv, row.allocated
                return True
            case "gap":
                request.target_len = min(row.base, len(request.ids))
                request.kv = row.kv
            case "unknown":
                self.requests.requeue(request)
            case "failed":
                self._strike(
                    request, f"the target's forward failed {MAX_STRIKES} times for this request: {error}"
                )
        if row.status != "idle":
            self.counters[f"row:{row.status}"] += 1
        return row.status == "failed"

    def _commit(self, request: Request, row: VerdictRow) -> bool:
        if not continues(request, row):
            self.counters["stale:VerdictRow"] += 1
            return False
        assert self._pair.limits is not None
        step = commit(request, row, self._pair.limits.max_model_len)
        request.kv, request.allocated, request.strikes = row.kv, row.allocated, 0
        self.effects.append(ev.Emit(request.request, step.ids, step.from_draft, row.drafted, step.accepted))
        if step.reason is not None:
            self._finish(request, step.reason)
        return True

    def _make_room(self, verdict: Verdict) -> bool:
        """Release the youngest request if one found no pages, unless pages are about to come back. True if a
        request moved on."""
        starved = [
            row for row in verdict.rows if row.status == "no_room" and row.request in self.requests.live
        ]
        if not starved or verdict.retiring_pages or self.requests.releases:
            return False
        youngest = self.requests.in_order()[-1]
        if len(self.requests.live) == 1:
            self._fail(youngest, "error", "the target has no pages for the only request that runs")
            return True
        self.counters["preempted"] += 1
        self.requests.releases.append(youngest.release_row())
        self.requests.requeue(youngest)
        return True

    def rewind_draft(self, message: Behind) -> None:
        """The draft missed commits: the next Propose sends again from what it has."""
        if message.stamp != self._pair.stamp or not self._draft:
            self.counters["stale:Behind"] += 1
            return
        for number, have in message.rows:
            request = self.requests.by_id.get(number)
            if request is not None and request.state == LIVE:
                request.draft_len = max(0, min(have, request.draft_len))
