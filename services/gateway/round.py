"""The messages of a round, from its plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.rounds import Admit, LiveRow, Propose, ProposeRow, ReleaseRow, Verify
from common.messages.stamp import Stamp
from services.gateway.options import RoundSample
from services.gateway.requests import Request
from services.gateway.schedule import RowPlan


@dataclass(slots=True)
class Round:
    """A round whose verdict is awaited. working: requests with rows in its forward or an admission.
    elsewhere_s: time that the target's device has worked for other groups since the round began."""

    verify: Verify
    started_at: float
    working: frozenset[int]
    elsewhere_s: float = 0.0


def begin_round(
    group: int,
    number: int,
    stamp: Stamp,
    k: int,
    plans: Sequence[RowPlan],
    admitted: Sequence[Request],
    releases: list[ReleaseRow],
    captures: bool,
    now: float,
) -> Round:
    """What is sent to the target counts as known to it from here on: the message is repeated until
    answered."""
    verify = Verify(
        stamp,
        group,
        number,
        k if any(plan.verify for plan in plans) else 0,
        [_live_row(plan) for plan in plans],
        [Admit(one.request, list(one.ids), one.sampling) for one in admitted],
        releases,
        captures and any(plan.works for plan in plans),
    )
    working = {plan.request.request for plan in plans if plan.works} | {one.request for one in admitted}
    return Round(verify, now, frozenset(working))


def sample_of(finished: Round, now: float) -> RoundSample:
    verify = finished.verify
    return RoundSample(
        verify.k,
        sum(row.verify for row in verify.live),
        sum(row.chunk_end - row.chunk_start for row in verify.live),
        now - finished.started_at - finished.elsewhere_s,
    )


def _live_row(plan: RowPlan) -> LiveRow:
    one = plan.request
    commit = one.target_commit()
    one.target_len = len(one.ids)
    return LiveRow(
        one.request, one.slot, one.generation, commit, plan.chunk_start, plan.chunk_end, plan.verify
    )


def propose_for(verify: Verify, plans: Sequence[RowPlan], sent: list[int]) -> Propose:
    """The same round for the draft. It may be lost: the draft says Behind when it misses ids. sent: as in
    Propose."""
    rows = [_propose_row(plan, verify.k) for plan in plans]
    return Propose(verify.stamp, verify.group, verify.round, verify.k, rows, sent)


def _propose_row(plan: RowPlan, k: int) -> ProposeRow:
    one = plan.request
    commit = one.draft_commit()
    one.draft_len = len(one.ids)
    draft = plan.verify and k > 0
    return ProposeRow(one.request, one.slot, one.generation, commit, one.allocated, draft, one.sampling)
