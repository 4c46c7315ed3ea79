"""Gateway, target and draft in one process without sockets: the real machines, the real device work on a tiny
model, and a seeded order of whatever is under way. After every event pages are counted and freed ones
poisoned."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from common.kv.lengths import pages_for
from common.messages.lifecycle import ConfigureDraft
from common.messages.rounds import Verdict
from common.model.llama import LlamaModel
from common.sampling.params import SamplingParams
from services.draft import events as dev
from services.draft.drafters.base import Drafter, SharedState
from services.draft.link import DraftLink
from services.draft.options import DraftOptions
from services.draft.work import DraftResult, DraftWork, Tree
from services.gateway import events as gev
from services.gateway.coordinator import Coordinator
from services.gateway.options import CoordinatorOptions, FixedK
from services.target import events as tev
from services.target.link import TargetLink
from services.target.options import TargetOptions
from services.target.runner import TargetRunner
from services.target.slots import Slots
from services.target.work import RoundWork
from tests.protocol.protocol_harness import draft_hello, target_hello

EVENT_S = 1e-4
MOST_EVENTS = 20_000


@dataclass(frozen=True)
class Job:
    """submit_at, abort_at: events after which it comes and is aborted; abort_at None lets it end by itself.
    stop: the id that ends its text."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    priority: int
    stop: int
    submit_at: int
    abort_at: int | None


@dataclass(frozen=True)
class Workload:
    """pages: that can be given out. bent: share of the drafter's tokens that are made wrong. early_timers:
    share of the steps at which the next timer fires although something else is under way."""

    jobs: tuple[Job, ...]
    pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_rows: int
    chunk_rows: int
    k: int
    bent: float
    early_timers: float
    seed: int


@dataclass
class Told:
    """What a request's client heard; how it ended."""

    stop: int
    text: list[int] = field(default_factory=list)
    emitted: int = 0
    end: str = ""

    def push(self, token_id: int) -> str | None:
        assert not self.end
        self.text.append(token_id)
        return "stop" if token_id == self.stop else None


class Loopback:
    """tally: how often things happened that workloads are there to bring about."""

    def __init__(
        self, model: LlamaModel, vocab_size: int, workload: Workload, drafter: Drafter | None
    ) -> None:
        self.workload = workload
        self.tally: Counter[str] = Counter()
        self.told = {number: Told(job.stop) for number, job in enumerate(workload.jobs, start=1)}
        self._random = random.Random(workload.seed)
        self._vocab_size = vocab_size
        self._now = 0.0
        self._ids = count(1)
        options = CoordinatorOptions(
            max_model_len=workload.max_model_len,
            kv_memory_bytes=workload.pages * workload.page_size,
            page_size=workload.page_size,
            max_num_seqs=workload.max_num_seqs,
            max_rows=workload.max_rows,
            chunk_rows=workload.chunk_rows,
            max_nodes=workload.k + 1,
        )
        self.gateway = Coordinator(options, FixedK(workload.k), self._ids.__next__)
        hello = target_hello(vocab_size=vocab_size, kv_bytes_per_position=1)
        self.target = TargetLink(hello, TargetOptions(), self._ids.__next__)
        self.runner = TargetRunner(model, vocab_size)
        self.drafter = drafter
        self.draft: DraftLink | None = None
        if drafter is not None:
            profile = draft_hello(
                vocab_size=vocab_size, kv_bytes_per_position=drafter.kv_bytes_per_position, max_k=8
            )
            self.draft = DraftLink(profile, DraftOptions(), self._ids.__next__)
        self._under_way: dict[str, deque[Callable[[], None]]] = {}
        self._timers: dict[tuple[str, str], float] = {}
        self._positions = 0
        self._table = torch.zeros(0)
        self._kv = torch.zeros(0, dtype=torch.uint8)
        self._free: set[int] = set()

    # What happens

    def play(self) -> None:
        """Until every request has ended, every slot is released and every page is free or idle."""
        self._feed_gateway(gev.Start())
        self._feed_target(tev.Start())
        if self.draft is not None:
            self._feed_draft(dev.Start())
        for step in range(MOST_EVENTS):
            self._come_and_go(step)
            self._step()
            if all(told.end for told in self.told.values()) and self._is_at_rest():
                return
        raise AssertionError(f"not at rest after {MOST_EVENTS} events: {self.told}")

    def _come_and_go(self, step: int) -> None:
        for number, job in enumerate(self.workload.jobs, start=1):
            if job.submit_at == step:
                submit = gev.Submit(
                    number, job.prompt, job.sampling, job.max_tokens, self.told[number], job.priority
                )
                self._feed_gateway(submit)
            if job.abort_at == step:
                self._feed_gateway(gev.Abort(number))

    def _is_at_rest(self) -> bool:
        slots = self.target.slots
        return slots is not None and not slots.live and not slots.retiring

    def _step(self) -> None:
        self._now += EVENT_S
        ready = [name for name, queue in self._under_way.items() if queue]
        if ready and self._random.random() >= self.workload.early_timers:
            self._under_way[self._random.choice(ready)].popleft()()
            return
        (machine, name), at = min(self._timers.items(), key=lambda item: item[1])
        del self._timers[machine, name]
        self._now = max(self._now, at)
        {"gateway": self._feed_gateway, "target": self._feed_target, "draft": self._feed_draft}[machine](
            gev.TimerFired(name)
        )

    def _later(self, channel: str, act: Callable[[], None]) -> None:
        self._under_way.setdefault(channel, deque()).append(act)

    # The gateway

    def _feed_gateway(self, event: Any) -> None:
        for effect in self.gateway.handle(event, self._now):
            self._gateway_effect(effect)

    def _gateway_effect(self, effect: gev.Effect) -> None:
        match effect:
            case gev.Send("target", message):
                self._later("gateway>target", lambda: self._feed_target(tev.Received(message)))
            case gev.Send("draft", message):
                if self.draft is not None:
                    self._later("gateway>draft", lambda: self._feed_draft(dev.Received(message)))
            case gev.SetTimer(name, at):
                self._timers["gateway", name] = at
            case gev.Emit(request=request, ids=ids, drafted=drafted, accepted=accepted):
                told = self.told[request]
                assert tuple(told.text[told.emitted :]) == ids
                told.emitted = len(told.text)
                self.tally["accepted"] += accepted
                self.tally["rejected"] += drafted - accepted
            case gev.Finished(request=request, reason=reason):
                assert not self.told[request].end
                self.told[request].end = reason
                self.tally[reason] += 1
            case gev.Failed(request=request, code=code, error=error):
                assert not self.told[request].end
                self.told[request].end = code
                assert code == "never_fits", error

    # The target

    def _feed_target(self, event: Any) -> None:
        for effect in self.target.handle(event, self._now):
            self._target_effect(effect)
        if (slots := self.target.slots) is not None:
            self._count_pages(slots)
            self._poison(slots)

    def _target_effect(self, effect: Any) -> None:
        match effect:
            case tev.SendGateway(message):
                if isinstance(message, Verdict):
                    self._tally_verdict(message)
                self._later("target>gateway", lambda: self._feed_gateway(gev.Received("target", message)))
            case tev.SendDraft(_, message):
                self._later("target>draft", lambda: self._feed_draft(dev.Received(message)))
            case tev.SetTimer(name, at):
                self._timers["target", name] = at
            case tev.Run(work):
                self._later("target device", lambda: self._execute(work))
            case tev.AllocatePool(configure):
                self.runner.allocate(configure)
                cache = self.runner._cache
                assert cache is not None
                first = configure.page_size
                cache.keys[:, first:] = cache.values[:, first:] = float("nan")
                self._free = set(range(1, configure.pages))
                self._positions = configure.pages * configure.page_size
                width = pages_for(configure.max_model_len, configure.page_size)
                self._table = torch.zeros(configure.slots, width, dtype=torch.int32)
                self._later(
                    "target memory",
                    lambda: self._feed_target(tev.PoolReady(configure.target, "endpoint")),
                )
            case tev.AllocateDraft(join):
                ready = tev.RegionReady(join.stamp.draft, b"manifest")
                self._kv = torch.full(
                    (self._positions * join.kv_bytes_per_position,), 0xFF, dtype=torch.uint8
                )
                self._later("target memory", lambda: self._feed_target(ready))
            case tev.TestRegion(draft, nonce):
                self._later("target memory", lambda: self._feed_target(tev.RegionTested(draft, nonce, True)))
            case tev.ExportRow(slot, pages):
                self._table[slot] = 0
                self._table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def _execute(self, work: RoundWork) -> None:
        assert self.target.slots is not None
        self._check_writes(self.target.slots, work)
        with torch.inference_mode():
            result = self.runner.execute(work)
        self._feed_target(tev.Executed(result))

    def _tally_verdict(self, verdict: Verdict) -> None:
        for row in verdict.rows:
            self.tally[row.status] += 1
        for answer in verdict.admitted:
            self.tally["hits"] += answer.cached > 0
            self.tally[f"admission {answer.status}"] += 1

    def _check_writes(self, slots: Slots, work: RoundWork) -> None:
        """A slot's work names its own pages, and writes only to those that nobody else holds or can find."""
        size = slots.pool.page_size
        spans = [(one, one.start, len(one.ids)) for one in work.chunks]
        spans += [(one, one.base - 1, len(one.tokens)) for one in work.trees]
        for one, start, rows in spans:
            assert list(one.pages) == slots.live[one.slot].pages
            for page in one.pages[start // size : (start + rows - 1) // size + 1]:
                assert slots.pool.references(page) == 1
                assert page not in slots.cache.pages

    def _count_pages(self, slots: Slots) -> None:
        """Every page is free, or has one reference for each slot that holds it and one for the cache."""
        held = Counter(page for slot in slots.live.values() for page in slot.pages)
        held.update(page for entry in slots.retiring for page in entry.pages)
        held.update(slots.cache.pages)
        references = {page: slots.pool.references(page) for page in range(slots.pool.pages)}
        assert {page: number for page, number in references.items() if number} == dict(held)
        assert slots.pool.free == slots.pool.pages - 1 - len(held)

    def _poison(self, slots: Slots) -> None:
        """What nobody holds holds nothing: whoever reads it has no finite logit left."""
        free = {page for page in range(1, slots.pool.pages) if not slots.pool.references(page)}
        cache, size = self.runner._cache, slots.pool.page_size
        assert cache is not None
        for page in free - self._free:
            there = slice(page * size, (page + 1) * size)
            cache.keys[:, there] = cache.values[:, there] = float("nan")
        self._free = free

    # The draft

    def _feed_draft(self, event: Any) -> None:
        assert self.draft is not None
        for effect in self.draft.handle(event, self._now):
            self._draft_effect(effect)

    def _draft_effect(self, effect: Any) -> None:
        match effect:
            case dev.SendGateway(message):
                self._later("draft>gateway", lambda: self._feed_gateway(gev.Received("draft", message)))
            case dev.SendTarget(message):
                self._later("draft>target", lambda: self._feed_target(tev.Received(message)))
            case dev.SetTimer(name, at):
                self._timers["draft", name] = at
            case dev.Run(work):
                self._later("draft device", lambda: self._draft(work))
            case dev.Attach(configure):
                self._attach(configure)
            case dev.ReadPattern(draft, nonce):
                self._later("draft memory", lambda: self._feed_draft(dev.PatternRead(draft, nonce, True)))

    def _attach(self, configure: ConfigureDraft) -> None:
        assert self.drafter is not None
        self.drafter.attach(
            SharedState(
                self._table,
                self._kv,
                None,
                configure.pages,
                configure.page_size,
                configure.max_model_len,
                configure.max_nodes,
            )
        )
        self._later("draft memory", lambda: self._feed_draft(dev.Attached(configure.stamp.draft)))

    def _draft(self, work: DraftWork) -> None:
        assert self.drafter is not None
        with torch.inference_mode():
            trees = self.drafter.draft(work).trees
        bent = tuple(self._bend(tree) for tree in trees)
        self._feed_draft(dev.Executed(DraftResult(work.group, work.round, bent)))

    def _bend(self, tree: Tree) -> Tree:
        """Some tokens made wrong, with the right one as a sibling behind them where there is room."""
        tokens, parents = [tree.tokens[0]], [-1]
        place = {0: 0}
        for node in range(1, len(tree.tokens)):
            parent = place[tree.parents[node]]
            token = tree.tokens[node]
            if self._random.random() < self.workload.bent:
                tokens.append((token + 1) % self._vocab_size)
                parents.append(parent)
                place[node] = len(tokens) - 1
                if self._random.random() < 0.5:
                    continue
            tokens.append(token)
            parents.append(parent)
            place[node] = len(tokens) - 1
        most = self.workload.k + 1
        return Tree(tree.slot, tuple(tokens[:most]), tuple(parents[:most]))
