"""Machines brought to the state that a rule speaks of, and short spellings of what they are told."""

from collections import Counter
from itertools import count

from common.messages.lifecycle import (
    Configure,
    Configured,
    ConfigureDraft,
    DraftHello,
    DraftReady,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    Message,
    SelfTest,
    SelfTestReply,
    TargetHello,
)
from common.messages.rounds import (
    Admit,
    AdmitAnswer,
    Commit,
    LiveRow,
    Propose,
    ProposeRow,
    Verdict,
    VerdictRow,
    Verify,
)
from common.messages.stamp import PROTOCOL_VERSION, Stamp
from common.sampling.params import SamplingParams
from services.draft import events as dev
from services.draft.link import DraftLink
from services.draft.options import DraftOptions
from services.gateway import events as gev
from services.gateway.coordinator import Coordinator
from services.gateway.options import CoordinatorOptions, FixedK
from services.target import events as tev
from services.target.link import TargetLink
from services.target.options import TargetOptions
from services.target.work import RoundResult, TreeResult

EPOCH, DRAFT = 7, 900
GREEDY = SamplingParams()


def target_hello(incarnation: int = 0, **fields: object) -> TargetHello:
    known = {
        "incarnation": incarnation,
        "protocol": PROTOCOL_VERSION,
        "model": "toy",
        "vocab_size": 100,
        "tokenizer": "abc",
        "plan": "p1",
        "device": "cpu",
        "kv_bytes_per_position": 1,
        "max_context": 1000,
        "max_rows": 1000,
    }
    return TargetHello(**{**known, **fields})


def draft_hello(incarnation: int = 0, **fields: object) -> DraftHello:
    known = {
        "incarnation": incarnation,
        "protocol": PROTOCOL_VERSION,
        "drafter": "toy",
        "vocab_size": 100,
        "tokenizer": "abc",
        "device": "cpu",
        "kv_bytes_per_position": 1,
        "max_k": 8,
    }
    return DraftHello(**{**known, **fields})


def messages(effects: list, kind: type) -> list:
    """Messages of one kind among the effects."""
    return [effect.message for effect in effects if isinstance(getattr(effect, "message", None), kind)]


def of(effects: list, kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


class TargetBench:
    """A configured target. pages counts page 0."""

    def __init__(
        self, pages: int = 20, page_size: int = 4, with_draft: bool = False, groups: int = 1
    ) -> None:
        ids = count(100)
        self.now = 0.0
        self.link = TargetLink(target_hello(), TargetOptions(), lambda: next(ids))
        self.feed(tev.Start())
        self.rounds: Counter[int] = Counter()
        self.draft = 0
        self.tell(Configure(EPOCH, self.link.incarnation, pages, page_size, 9, 40, 4, groups))
        self.feed(tev.PoolReady(self.link.incarnation, "endpoint"))
        if with_draft:
            self.join(DRAFT)

    def join(self, draft: int) -> None:
        self.draft = draft
        self.tell(JoinDraft(self.stamp, 1))
        self.feed(tev.RegionReady(draft, b"manifest"))
        self.tell(SelfTest(self.stamp, 5))
        self.feed(tev.RegionTested(draft, 5, True))

    @property
    def stamp(self) -> Stamp:
        return Stamp(EPOCH, self.link.incarnation, self.draft)

    def feed(self, event: object) -> list:
        return self.link.handle(event, self.now)

    def tell(self, message: Message) -> list:
        return self.feed(tev.Received(message))

    @property
    def round(self) -> int:
        """The latest round of group 0."""
        return self.rounds[0]

    def verify(self, live=(), admits=(), releases=(), k: int = 0, group: int = 0) -> Verify:
        """The next round of the group."""
        self.rounds[group] += 1
        return Verify(self.stamp, group, self.rounds[group], k, list(live), list(admits), list(releases))

    def admit(self, request: int, ids: list[int], group: int = 0) -> AdmitAnswer:
        """Admit into the slots at hand, with everything that is live kept idle."""
        live = [
            LiveRow(one.request, one.slot, one.generation, Commit(len(one.ids), []), 0, 0, False)
            for one in self.link.slots.live_in(group)
        ]
        effects = self.tell(self.verify(live, admits=[Admit(request, ids, GREEDY)], group=group))
        return messages(effects, Verdict)[0].admitted[0]

    def execute(self, effects: list, ids: dict[int, tuple[int, ...]], error: str = "") -> list:
        """Finish the Run among the effects; ids by slot."""
        work = of(effects, tev.Run)[0].work
        trees = tuple(TreeResult(tree.slot, ids[tree.slot]) for tree in work.trees if not error)
        return self.feed(tev.Executed(RoundResult(work.group, work.round, trees, 10, error)))


def decode_row(answer: AdmitAnswer, ids: list[int], start: int, chunk: tuple[int, int] = (0, 0)) -> LiveRow:
    """Verify the slot's bonus token after a commit of ids at start."""
    return LiveRow(answer.request, answer.slot, answer.generation, Commit(start, ids), *chunk, True)


class DraftBench:
    """A draft that is attached and tested."""

    def __init__(self, groups: int = 1, **hello: object) -> None:
        ids = count(100)
        self.now = 0.0
        profile = draft_hello(**hello)
        self.link = DraftLink(profile, DraftOptions(), lambda: next(ids))
        self.feed(dev.Start())
        self.stamp = Stamp(EPOCH, 500, self.link.incarnation)
        self.configure = ConfigureDraft(self.stamp, "endpoint", b"manifest", 20, 4, 9, 40, 4, groups)
        self.tell(self.configure)
        effects = self.feed(dev.Attached(self.link.incarnation))
        nonce = messages(effects, SelfTest)[0].nonce
        self.tell(SelfTestReply(self.stamp, nonce, True))
        self.ready = self.feed(dev.PatternRead(self.link.incarnation, nonce + 1, True))

    def feed(self, event: object) -> list:
        return self.link.handle(event, self.now)

    def tell(self, message: Message) -> list:
        return self.feed(dev.Received(message))

    def propose(
        self, round_: int, rows: list[ProposeRow], k: int = 3, group: int = 0, sent: tuple[int, ...] = ()
    ) -> list:
        return self.tell(Propose(self.stamp, group, round_, k, rows, list(sent)))

    def verdict(self, round_: int, rows: list[VerdictRow], hidden: str = "none", group: int = 0) -> list:
        return self.tell(Verdict(self.stamp, group, round_, rows, [], "used", 5, 0, 10, hidden=hidden))


def propose_row(
    ids: list[int], start: int = 0, request: int = 1, slot: int = 3, generation: int = 1, draft: bool = True
) -> ProposeRow:
    return ProposeRow(request, slot, generation, Commit(start, ids), 30, draft, GREEDY)


class Sink:
    """Stops at one token."""

    def __init__(self, stop: int = -1) -> None:
        self.stop = stop
        self.text: list[int] = []

    def push(self, token_id: int) -> str | None:
        self.text.append(token_id)
        return "stop" if token_id == self.stop else None


class GatewayBench:
    """A gateway with a target that serves, and a draft if wanted."""

    def __init__(self, with_draft: bool = False, **options: object) -> None:
        known = {
            "max_model_len": 40,
            "kv_memory_bytes": 80,
            "page_size": 4,
            "max_num_seqs": 4,
            "max_nodes": 4,
        }
        ids = count(1)
        self.now = 0.0
        self.rounds: Counter[int] = Counter()
        self.gateway = Coordinator(CoordinatorOptions(**{**known, **options}), FixedK(3), lambda: next(ids))
        self.sinks: dict[int, Sink] = {}
        self.feed(gev.Start())
        self.serve(500)
        if with_draft:
            self.join(DRAFT)

    def feed(self, event: object) -> list:
        return self.gateway.handle(event, self.now)

    def tell(self, message: Message, peer: str = "target") -> list:
        return self.feed(gev.Received(peer, message))

    def tick_until(self, now: float) -> list:
        """Ticks every half second up to `now`; the effects of the last."""
        effects = []
        while self.now < now:
            self.now = min(self.now + 0.5, now)
            effects = self.feed(gev.TimerFired("tick"))
        return effects

    def serve(self, incarnation: int, **hello: object) -> list:
        """A target comes and is configured."""
        self.target = incarnation
        self.draft = 0
        self.rounds.clear()
        effects = self.tell(target_hello(incarnation, **hello))
        return effects + self.tell(Configured(self.gateway.epoch, incarnation, "endpoint"))

    def join(self, incarnation: int, **hello: object) -> list:
        self.draft = incarnation
        effects = self.tell(draft_hello(incarnation, **hello), "draft")
        effects += self.tell(DraftRegion(self.stamp, b"manifest"))
        return effects + self.tell(DraftReady(self.stamp), "draft")

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.gateway.epoch, self.target, self.draft)

    def submit(
        self, request: int, prompt: list[int], max_tokens: int = 20, stop: int = -1, priority: int = 0
    ) -> list:
        sink = self.sinks[request] = Sink(stop)
        return self.feed(gev.Submit(request, tuple(prompt), GREEDY, max_tokens, sink, priority))

    def answer(
        self,
        rows=(),
        admitted=(),
        draft: str = "none",
        free: int = 20,
        retiring: int = 0,
        error: str = "",
        group: int = 0,
    ) -> list:
        """The verdict of the round that is awaited in the group."""
        self.rounds[group] += 1
        return self.tell(self.verdict(rows, admitted, draft, free, retiring, error, group=group))

    def verdict(
        self, rows=(), admitted=(), draft="none", free=20, retiring=0, error="", round_=None, group=0
    ) -> Verdict:
        number = self.rounds[group] if round_ is None else round_
        return Verdict(
            self.stamp, group, number, list(rows), list(admitted), draft, free, retiring, 10, error
        )

    def run_prompt(self, request: int, prompt: list[int], **submit: object) -> list:
        """Submit alone, admit to slot `request` and compute the prompt; the bonus token's verify row is asked
        for."""
        self.submit(request, prompt, **submit)
        return self.answer(admitted=[AdmitAnswer(request, "ok", request, 1, 0, 16)])

    def beat(self, rounds: int = 0, busy: bool = False) -> list:
        return self.tell(Heartbeat(self.gateway.epoch, self.draft, rounds, busy), "draft")


def ok_row(request: int, base: int, ids: list[int], drafted: int = 0) -> VerdictRow:
    kv = base + len(ids) - 1
    return VerdictRow(request, request, 1, "ok", base, kv, kv + 5, ids, drafted, len(ids) - 1)


def row(request: int, status: str, base: int, kv: int = 0) -> VerdictRow:
    return VerdictRow(request, request, 1, status, base, kv, 16, [])
