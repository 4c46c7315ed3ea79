"""The rounds of one group, without I/O: the only place that commits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.actors.machine import Machine
from common.actors.table import Table
from common.messages.rounds import AdmitAnswer, Commit, ReleaseRow, Verdict, VerdictRow
from services.gateway import events as ev
from services.gateway.commit import commit, continues
from services.gateway.drafting import DraftPause
from services.gateway.lifetimes import MAX_STRIKES, Lifetimes
from services.gateway.options import CoordinatorOptions, KController
from services.gateway.pair import Pair
from services.gateway.requests import Request
from services.gateway.round import Round, begin_round, propose_for, sample_of
from services.gateway.schedule import (
    choose_admissions,
    choose_workers,
    count_verify_rows,
    plan_rows,
)
from services.gateway.usage import Usage

IDLE, VERIFYING, PAUSING = STATES = ("idle", "verifying", "pausing")

ROUND_TABLE = Table(
    STATES,
    {
        Verdict: {VERIFYING: "take_verdict"},
        ev.TimerFired: {VERIFYING: "verify_again", PAUSING: "resume"},
    },
)


@dataclass(slots=True)
class Shared:
    """What the groups share. target, draft: incarnations that rounds are sent to, 0 without.
    free_pages, retiring_pages: the target's pool after the latest verdict, whose serial is pool_serial."""

    options: CoordinatorOptions
    controller: KController
    pair: Pair
    lifetimes: Lifetimes
    usage: Usage
    counters: Counter[str]
    target: int = 0
    draft: int = 0
    free_pages: int = 0
    retiring_pages: int = 0
    pool_serial: int = 0
    groups: list[Group] = field(default_factory=list)

    @property
    def outstanding(self) -> list[Round]:
        return [group.round for group in self.groups if group.round is not None]

    def target_changes(self, target: int, free_pages: int) -> None:
        self.target = target
        self.free_pages, self.retiring_pages, self.pool_serial = free_pages, 0, 0
        for group in self.groups:
            group.begin_anew()

    def learn_of_pool(self, verdict: Verdict) -> None:
        """Verdicts of two groups may arrive in another order than they were made."""
        if verdict.serial < self.pool_serial:
            return
        if verdict.free_pages > self.free_pages:
            for group in self.groups:
                group.wake()
        self.free_pages, self.retiring_pages = verdict.free_pages, verdict.retiring_pages
        self.pool_serial = verdict.serial


class Group(Machine[ev.Effect]):
    """One outstanding round at a time, numbered from 1 under each target.

    round: the one whose verdict is awaited. proposed: newest round that the present draft was sent a Propose
    for.
    """

    table = ROUND_TABLE

    def __init__(self, number: int, shared: Shared) -> None:
        super().__init__(IDLE, shared.counters)
        self.number = number
        self._shared = shared
        self._requests = shared.lifetimes.requests
        self.begin_anew()
        self.draft_changes()

    def begin_anew(self) -> None:
        """Under another target, or none."""
        self.state = IDLE
        self.round: Round | None = None
        self.proposed = 0
        self._round_number = 0
        self._resend_at = 0.0
        self._resume_at = 0.0
        self._stalls = 0

    def draft_changes(self) -> None:
        self.proposed = 0
        self._drafting = DraftPause(self._shared.options)

    def wake(self) -> None:
        """Something changed that a pause may have waited for."""
        if self.state == PAUSING:
            self.state = IDLE

    # A round begins

    def start_if_needed(self) -> bool:
        """True if a round began. While a request is suspected of killing the target one round is outstanding
        at a time, so that it is at work alone."""
        shared, requests = self._shared, self._requests
        if self.state != IDLE or not shared.target or self._must_wait():
            return False
        admitted = self._choose_admissions()
        workers = choose_workers(requests, admitted, self.number)
        if admitted or workers or requests.releases[self.number]:
            self._start(admitted, workers)
        elif shared.retiring_pages and not shared.outstanding:
            self._pause()
        return self.round is not None

    def _must_wait(self) -> bool:
        return bool(self._shared.outstanding) and self._requests.any_suspect

    def _choose_admissions(self) -> list[Request]:
        shared = self._shared
        assert shared.pair.limits is not None
        if not self._requests.waiting:
            return []
        return choose_admissions(
            self._requests, shared.pair.limits, shared.free_pages, self.number, len(shared.groups)
        )

    def _pause(self) -> None:
        options = self._shared.options
        pause_s = min(options.stall_s * 2**self._stalls, options.stall_max_s)
        self._stalls += 1
        self.state = PAUSING
        self._resume_at = self.now + pause_s
        self.set_timer(f"pause:{self.number}", self._resume_at)

    def resume(self, event: ev.TimerFired) -> None:
        """The pause is over: send a round, even one that asks for nothing, to learn what changed."""
        if event.name != f"pause:{self.number}" or not self.is_due(self._resume_at):
            return
        self.state = IDLE
        if not self._must_wait():
            admitted = self._choose_admissions()
            self._start(admitted, choose_workers(self._requests, admitted, self.number))

    def _start(self, admitted: list[Request], workers: list[Request]) -> None:
        shared, requests = self._shared, self._requests
        limits = shared.pair.limits
        assert limits is not None
        live = [one for one in requests.in_order() if one.group == self.number]
        k = self._choose_k(count_verify_rows(workers), limits.max_rows, limits.max_nodes)
        plans = plan_rows(live, workers, k, limits)
        for request in admitted:
            requests.admit(request, self.number)
        self._round_number += 1
        releases = requests.releases.pop(self.number, [])
        self.round = begin_round(
            self.number,
            self._round_number,
            shared.pair.stamp,
            k,
            plans,
            admitted,
            releases,
            self._captures,
            self.now,
        )
        if shared.draft:
            self.proposed = self._round_number
            sent = [group.proposed for group in shared.groups]
            self.effects.append(ev.Send("draft", propose_for(self.round.verify, plans, sent)))
        self.state = VERIFYING
        self._send_verify()

    def _choose_k(self, verify_rows: int, max_rows: int, max_nodes: int) -> int:
        shared = self._shared
        draft = shared.pair.draft
        if not shared.draft or draft is None or self._drafting.paused(self.now, shared.pair.draft_beat):
            return 0
        k = min(shared.controller.choose(verify_rows), draft.max_k, max_nodes - 1)
        return max(0, min(k, max_rows // max(1, verify_rows) - 1))

    @property
    def _captures(self) -> bool:
        """Whether the draft is to read the target's hidden rows, also while k is 0: what it misses it lacks
        for the rest of a request."""
        draft = self._shared.pair.draft
        return bool(self._shared.draft and draft is not None and draft.capture)

    def _send_verify(self) -> None:
        assert self.round is not None
        self.effects.append(ev.Send("target", self.round.verify))
        self._resend_at = self.now + self._shared.options.resend_s
        self.set_timer(f"verify:{self.number}", self._resend_at)

    def verify_again(self, event: ev.TimerFired) -> None:
        """No verdict yet: send the identical Verify, or give the target up after round_timeout_s."""
        assert self.round is not None
        if event.name != f"verify:{self.number}" or not self.is_due(self._resend_at):
            return
        timeout_s = self._shared.options.round_timeout_s
        if self.now - self.round.started_at >= timeout_s:
            self._shared.pair.lose_target(f"target did not finish a round within {timeout_s:g} s")
            return
        self.counters["resent:Verify"] += 1
        self._send_verify()

    # A round ends

    def take_verdict(self, verdict: Verdict) -> None:
        """Commit what was accepted, token by token up to a stop; seat who was admitted; then the next
        round."""
        assert self.round is not None
        if not self._is_awaited(verdict):
            self.counters["stale:Verdict"] += 1
            return
        shared = self._shared
        sample = sample_of(self.round, self.now)
        self.round = None
        self.state = IDLE
        shared.pair.rounds += 1
        shared.pair.heard_verdict(verdict.stamp.draft)
        shared.controller.observe(verdict, sample)
        self._drafting.observe(verdict.draft, self.now, shared.pair.draft_beat)
        self._count_time(verdict.elapsed_us * 1e-6)
        shared.usage.hidden_rounds[verdict.hidden] += 1
        shared.learn_of_pool(verdict)
        moved = [self._seat(answer) for answer in verdict.admitted]
        moved += [self._take_row(row, verdict.error) for row in verdict.rows]
        moved.append(self._make_room(verdict))
        if any(moved):
            self._stalls = 0
        elif verdict.rows or verdict.admitted:
            self._pause()

    def _is_awaited(self, verdict: Verdict) -> bool:
        assert self.round is not None
        stamp = verdict.stamp
        is_current = stamp.epoch == self._shared.pair.epoch and stamp.target == self._shared.target
        return is_current and verdict.round == self.round.verify.round

    def _count_time(self, device_s: float) -> None:
        self._shared.usage.target_worked(device_s)
        for other in self._shared.outstanding:
            other.elsewhere_s += min(device_s, self.now - other.started_at)

    def _seat(self, answer: AdmitAnswer) -> bool:
        """True if the request moved on."""
        requests = self._requests
        request = requests.by_id.get(answer.request)
        if request is None:
            if answer.status == "ok":
                requests.releases[self.number].append(
                    ReleaseRow(answer.request, answer.slot, answer.generation, Commit(0, []))
                )
            return True
        if answer.status == "ok":
            if request.admitted_at is None:
                request.admitted_at = self.now
                request.cached_tokens = answer.cached
            requests.go_live(request, answer)
            return True
        requests.requeue(request)
        self.counters[f"admission:{answer.status}"] += 1
        if answer.status == "never_fits":
            self._shared.lifetimes.fail_too_long(request)
            return True
        return False

    def _take_row(self, row: VerdictRow, error: str) -> bool:
        """True if the request moved on."""
        request = self._requests.live.get(row.request)
        if request is None:
            return True
        if (request.group, request.slot, request.generation) != (self.number, row.slot, row.generation):
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
                self._requests.requeue(request)
            case "failed":
                self._shared.lifetimes.strike(
                    request, f"the target's forward failed {MAX_STRIKES} times for this request: {error}"
                )
        if row.status != "idle":
            self.counters[f"row:{row.status}"] += 1
        return row.status == "failed"

    def _commit(self, request: Request, row: VerdictRow) -> bool:
        if not continues(request, row):
            self.counters["stale:VerdictRow"] += 1
            return False
        limits = self._shared.pair.limits
        assert limits is not None
        step = commit(request, row, limits.max_model_len)
        request.kv, request.allocated, request.strikes = row.kv, row.allocated, 0
        self.effects.append(ev.Emit(request.request, step.ids, step.from_draft, row.drafted, step.accepted))
        if step.reason is not None:
            self._shared.lifetimes.finish(request, step.reason)
        return True

    def _make_room(self, verdict: Verdict) -> bool:
        """Release the youngest request of all groups if one found no pages, unless pages are about to come
        back, or have since. True if a request moved on."""
        requests = self._requests
        starved = [row for row in verdict.rows if row.status == "no_room" and row.request in requests.live]
        if not starved or self._pages_are_due(verdict) or requests.admitting:
            return False
        youngest = requests.in_order()[-1]
        if len(requests.live) == 1:
            error = "the target has no pages for the only request that runs"
            self._shared.lifetimes.fail(youngest, "error", error)
            return True
        self.counters["preempted"] += 1
        requests.release(youngest)
        requests.requeue(youngest)
        self._shared.groups[youngest.group].wake()
        return True

    def _pages_are_due(self, verdict: Verdict) -> bool:
        shared = self._shared
        return bool(
            verdict.retiring_pages
            or verdict.serial < shared.pool_serial
            or any(round_.verify.releases for round_ in shared.outstanding)
            or any(self._requests.releases.values())
        )
