"""Every unfinished request: its log, where it stands, and the order in which requests are served."""

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field

from common.messages.rounds import AdmitAnswer, Commit, ReleaseRow
from common.sampling.params import SamplingParams
from services.gateway.engine import SpecStats
from services.gateway.events import Sink

WAITING, ADMITTING, LIVE = "waiting", "admitting", "live"


@dataclass(slots=True, eq=False)
class Request:
    """ids: the log, prompt + committed; only its end grows. group means something while it is admitting or
    live, slot … target_len while it is live.

    kv: valid KV length as the target told it. target_len, draft_len: ids that each service was sent.
    strikes: target crashes and failed forwards in a row that found this request at work at the same point,
    struck_at = (ids, kv); a committed step clears them.
    """

    request: int
    prompt_len: int
    ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    priority: int
    arrival: int
    sink: Sink
    state: str = WAITING
    group: int = 0
    slot: int = 0
    generation: int = 0
    kv: int = 0
    allocated: int = 0
    target_len: int = 0
    draft_len: int = 0
    strikes: int = 0
    struck_at: tuple[int, int] = (0, 0)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    admitted_at: float | None = None

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served within a priority."""
        return self.priority, self.arrival

    @property
    def suspect(self) -> bool:
        return self.strikes > 0

    def strike(self) -> None:
        at = (len(self.ids), self.kv)
        self.strikes = self.strikes + 1 if at == self.struck_at else 1
        self.struck_at = at

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def prefill_left(self) -> int:
        """Positions to compute before the bonus token may be a verify row."""
        return max(0, len(self.ids) - 1 - self.kv)

    def target_commit(self) -> Commit:
        """What the target has not been sent yet."""
        return Commit(self.target_len, self.ids[self.target_len :])

    def draft_commit(self) -> Commit:
        return Commit(self.draft_len, self.ids[self.draft_len :])

    def release_row(self) -> ReleaseRow:
        return ReleaseRow(self.request, self.slot, self.generation, self.target_commit())

    def count_step(self, drafted: int, accepted: int) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def stats(self) -> SpecStats:
        return SpecStats(self.steps, self.drafted, self.accepted, tuple(self.histogram))


class Requests:
    """waiting is sorted by order. admitting: their Admit is on the way. releases: by group, slots that the
    target is to release with the group's next round."""

    def __init__(self) -> None:
        self.by_id: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.admitting: dict[int, Request] = {}
        self.live: dict[int, Request] = {}
        self.releases: defaultdict[int, list[ReleaseRow]] = defaultdict(list)
        self._arrivals = 0

    def add(
        self,
        request: int,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        priority: int,
        sink: Sink,
    ) -> Request:
        self._arrivals += 1
        added = Request(
            request, len(prompt_ids), list(prompt_ids), sampling, max_tokens, priority, self._arrivals, sink
        )
        self.by_id[request] = added
        insort(self.waiting, added, key=lambda one: one.order)
        return added

    def in_order(self) -> list[Request]:
        """Live requests, the oldest of the first class first."""
        return sorted(self.live.values(), key=lambda one: one.order)

    @property
    def seated(self) -> list[Request]:
        """Those that have a slot, or will."""
        return [*self.live.values(), *self.admitting.values()]

    @property
    def any_suspect(self) -> bool:
        return any(one.suspect for one in self.by_id.values())

    def admit(self, request: Request, group: int) -> None:
        """Its Admit goes with the group's round."""
        self.waiting.remove(request)
        self.admitting[request.request] = request
        request.state = ADMITTING
        request.group = group

    def go_live(self, request: Request, answer: AdmitAnswer) -> None:
        del self.admitting[request.request]
        request.state = LIVE
        request.slot = answer.slot
        request.generation = answer.generation
        request.kv = answer.cached
        request.allocated = answer.allocated
        request.target_len = len(request.ids)
        request.draft_len = 0
        self.live[request.request] = request

    def requeue(self, request: Request) -> None:
        """Back to the queue with its whole log; its age puts it at the front of its class."""
        self.live.pop(request.request, None)
        self.admitting.pop(request.request, None)
        request.state = WAITING
        insort(self.waiting, request, key=lambda one: one.order)

    def remove(self, request: Request) -> None:
        """It has ended; its slot, if it has one, goes with the next round of its group."""
        del self.by_id[request.request]
        if request.state == WAITING:
            self.waiting.remove(request)
        elif request.state == ADMITTING:
            del self.admitting[request.request]
        else:
            del self.live[request.request]
            self.release(request)

    def release(self, request: Request) -> None:
        self.releases[request.group].append(request.release_row())
