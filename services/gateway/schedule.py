"""What the next round computes: who is admitted, who works, and on which rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.lengths import pages_for, step_positions
from services.gateway.requests import Request, Requests


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the configured target. max_rows: token rows of one forward."""

    max_num_seqs: int
    max_rows: int
    chunk_rows: int
    max_nodes: int
    max_model_len: int
    pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """chunk_end equal to chunk_start means no chunk."""

    request: Request
    chunk_start: int
    chunk_end: int
    verify: bool

    @property
    def works(self) -> bool:
        return self.verify or self.chunk_end > self.chunk_start


def pages_to_admit(request: Request, limits: Limits) -> int:
    """What it takes when nothing is found in the prefix cache, which the gateway cannot know."""
    positions = step_positions(len(request.ids), limits.max_nodes, limits.max_model_len)
    return min(pages_for(positions, limits.page_size), limits.pages - 1)


def choose_admissions(
    requests: Requests, limits: Limits, free_pages: int, group: int, groups: int
) -> list[Request]:
    """Those that this group admits now: first come, first served while there are seats and pages, with a page
    left for the growth of every slot, and no more than make the groups alike.

    While a request is suspected of killing the target, only the first suspect is admitted, and only when no
    other suspect has a slot. With nothing live the first of the queue is always tried.
    """
    seated = requests.seated
    candidates = requests.waiting
    if requests.any_suspect:
        if any(one.suspect for one in seated):
            return []
        candidates = [one for one in requests.waiting if one.suspect][:1]
    free_pages -= sum(pages_to_admit(one, limits) for one in requests.admitting.values())
    chosen: list[Request] = []
    for request in candidates:
        needed = pages_to_admit(request, limits)
        running = len(seated) + len(chosen)
        if running >= limits.max_num_seqs or (running and needed + running > free_pages):
            break
        chosen.append(request)
        free_pages -= needed
    alike = -(-(len(seated) + len(chosen)) // groups)
    return chosen[: max(0, alike - sum(one.group == group for one in seated))]


def choose_workers(requests: Requests, admitted: Sequence[Request], group: int) -> list[Request]:
    """Everyone of the group, or the first suspect of all groups alone; nobody in the round that admits a
    suspect."""
    if any(one.suspect for one in admitted):
        return []
    live = requests.in_order()
    suspects = [one for one in live if one.suspect]
    return [one for one in suspects[:1] or live if one.group == group]


def count_verify_rows(workers: Sequence[Request]) -> int:
    return sum(1 for one in workers if one.prefill_left == 0)


def plan_rows(live: Sequence[Request], workers: Sequence[Request], k: int, limits: Limits) -> list[RowPlan]:
    """A plan for every live request: decode rows first, then prompt chunks in order, within max_rows.

    A verify row costs 1 + k rows. The last chunk of a prompt shares the round with its verify row if both
    fit.
    """
    budget = limits.max_rows
    work: dict[int, RowPlan] = {}
    for one in workers:
        if one.prefill_left == 0 and budget >= 1 + k:
            work[one.request] = RowPlan(one, one.kv, one.kv, verify=True)
            budget -= 1 + k
    for one in workers:
        rows = min(one.prefill_left, limits.chunk_rows, budget)
        if rows > 0:
            budget -= rows
            verify = rows == one.prefill_left and budget >= 1 + k
            budget -= 1 + k if verify else 0
            work[one.request] = RowPlan(one, one.kv, one.kv + rows, verify)
    return [work.get(one.request) or RowPlan(one, one.kv, one.kv, verify=False) for one in live]
