"""What a seed decides before the first event, and the pieces of a simulated world."""

import random
from dataclasses import dataclass, field

from toy_devices import DraftDevice, TargetDevice
from toy_model import EOS, VOCAB, Violation
from toy_rows import RowBuffer

from common.messages.rounds import Proposal, ProposalRow
from services.draft.link import DraftLink
from services.gateway import events as gev
from services.target.link import TargetLink


@dataclass(frozen=True)
class World:
    """Everything that a seed chooses before the first event. Times in seconds of virtual time. sharing: how
    many of the prompts begin with some of `common` or with what a request before them has said."""

    drop: float
    duplicate: float
    reorder: float
    latency_s: float
    pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_rows: int
    chunk_rows: int
    k: int
    device_s: float
    draft_s: float
    skill: float
    branching: bool
    lies: float
    forward_errors: float
    target_crashes: int
    draft_crashes: int
    draft_hangs: bool
    target_hangs: bool
    partitions: int
    has_draft: bool
    notice: float
    requests: int
    aborts: float
    span_s: float
    sharing: float
    common: tuple[int, ...]
    groups: int
    captures: bool


def draw_world(rng: random.Random) -> World:
    network = rng.choice(("clean", "clean", "lossy", "wild"))
    drop, duplicate, reorder = {"clean": (0, 0, 0), "lossy": (0.05, 0.02, 0.02), "wild": (0.15, 0.1, 0.2)}[
        network
    ]
    page_size = rng.choice((1, 2, 4, 8))
    max_model_len = rng.choice((24, 40))
    tight = rng.random() < 0.5
    positions = rng.randint(max_model_len, 2 * max_model_len) if tight else 6 * max_model_len
    return World(
        drop=drop,
        duplicate=duplicate,
        reorder=reorder,
        latency_s=rng.choice((0.0002, 0.002)),
        pages=1 + positions // page_size,
        page_size=page_size,
        max_num_seqs=rng.choice((1, 2, 4)),
        max_model_len=max_model_len,
        max_rows=rng.choice((8, 16, 64)),
        chunk_rows=rng.choice((3, 8, 64)),
        k=rng.choice((1, 3, 6)),
        device_s=rng.choice((0.002, 0.02)),
        draft_s=rng.choice((0.001, 0.01, 0.1)),
        skill=rng.choice((1.0, 0.7, 0.0)),
        branching=rng.random() < 0.3,
        lies=rng.choice((0.0, 0.0, 0.3)),
        forward_errors=rng.choice((0.0, 0.0, 0.0, 0.02)),
        target_crashes=rng.choice((0, 0, 0, 1, 1, 2)),
        draft_crashes=rng.choice((0, 0, 1, 1, 2)),
        draft_hangs=rng.random() < 0.1,
        target_hangs=rng.random() < 0.05,
        partitions=rng.choice((0, 0, 0, 0, 1, 2)),
        has_draft=rng.random() < 0.9,
        notice=rng.choice((0.0, 0.5, 1.0)),
        requests=rng.randint(2, 6),
        aborts=rng.choice((0.0, 0.2)),
        span_s=rng.choice((0.05, 0.5)),
        sharing=rng.choice((0.0, 0.7, 1.0)),
        common=tuple(rng.randrange(1, VOCAB) for _ in range(18)),
        groups=rng.choice((1, 2)),
        captures=rng.random() < 0.6,
    )


class ToySink:
    """Compares every committed token with the text that is due."""

    def __init__(self, request: int, due: list[int]) -> None:
        self.request = request
        self.due = due
        self.text: list[int] = []

    def __repr__(self) -> str:
        return f"sink of {self.request}"

    def push(self, token_id: int) -> str | None:
        at = len(self.text)
        if at >= len(self.due) or token_id != self.due[at]:
            raise Violation(
                f"request {self.request}: token {at} is {token_id}, due was {self.due[at : at + 1]}"
            )
        self.text.append(token_id)
        return "stop" if token_id == EOS else None


@dataclass
class Job:
    """A request as the world sees it. blamed: target losses and failed forwards while it had work."""

    submit: gev.Submit
    sink: ToySink
    aborted: bool = False
    emitted: int = 0
    blamed: int = 0
    ended: gev.Finished | gev.Failed | None = None


@dataclass
class Process:
    """One run of a service. machine is replaced by another process at a crash, never restarted in place."""

    name: str
    machine: TargetLink | DraftLink
    device: TargetDevice | DraftDevice
    alive: bool = True
    running: object | None = None
    timers: dict[str, float] = field(default_factory=dict)
    executed: set[tuple[int, int, int]] = field(default_factory=set)
    tables: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    buffers: dict[int, RowBuffer] = field(default_factory=dict)
    region: int = 0
    hung: bool = False


def corrupt(proposal: Proposal, rng: random.Random) -> Proposal:
    """What a broken drafter might say."""
    rows = list(proposal.rows)
    for index, row in enumerate(rows):
        lie = rng.randrange(9)
        request, slot, generation, base = row.request, row.slot, row.generation, row.base
        tokens, parents = list(row.tokens), list(row.parents)
        if lie == 0:
            base += rng.choice((-1, 1, 1000))
        elif lie == 1:
            generation += rng.choice((-1, 1))
        elif lie == 2:
            tokens[0] = (tokens[0] + 1) % VOCAB
        elif lie == 3:
            tokens[-1] = rng.choice((-1, VOCAB, 1 << 40))
        elif lie == 4:
            parents[-1] = rng.choice((-1, len(parents), -7))
        elif lie == 5:
            tokens, parents = tokens * 9, parents * 9
        elif lie == 6:
            tokens, parents = rng.choice((([], []), (tokens, parents[:-1])))
        elif lie == 7:
            slot = rng.choice((0, slot + 1, 1 << 40))
        else:
            rows.append(row)
        rows[index] = ProposalRow(request, slot, generation, base, tokens, parents)
    acked = proposal.acked if rng.random() < 0.9 else proposal.acked + 1000
    return Proposal(proposal.stamp, proposal.group, proposal.round, acked, rows)
