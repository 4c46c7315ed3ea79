"""What the target's device thread is asked to do in one round, and what it answers. Plain data, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute KV for ids at positions start, start + 1, … of a slot; samples nothing."""

    slot: int
    pages: tuple[int, ...]
    start: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Verify a token tree. Node j has its KV at physical position base − 1 + j and stands at logical
    position base − 1 + depth(j). Node 0 is the bonus token; parents[0] is −1 and parents[j] < j."""

    slot: int
    pages: tuple[int, ...]
    base: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Capture:
    """Write hidden rows to a block of the draft that a region is held for. layers: whose entering residual
    stream makes up a row."""

    draft: int
    block: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A slot's chunk comes before its tree in the same forward when both are there. capture: None captures
    nothing."""

    group: int
    round: int
    chunks: tuple[PrefillChunk, ...]
    trees: tuple[TreeRows, ...]
    capture: Capture | None = None


@dataclass(frozen=True, slots=True)
class TreeResult:
    """ids: accepted path, then the new bonus token. The accepted path's KV is at its logical positions."""

    slot: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HiddenSpan:
    """Rows first, first + 1, … of the captured block: the slot's chunk, then root and accepted path."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """error is set when the forward failed: then no row has a result. hidden: one span per slot with rows in
    the block; empty when nothing was captured."""

    group: int
    round: int
    trees: tuple[TreeResult, ...]
    elapsed_us: int
    error: str = ""
    hidden: tuple[HiddenSpan, ...] = ()


def hidden_spans(work: RoundWork, trees: Iterable[TreeResult]) -> tuple[HiddenSpan, ...]:
    """The spans that a captured round fills, in the order of its slots' first rows."""
    counts: dict[int, int] = {chunk.slot: len(chunk.ids) for chunk in work.chunks}
    for tree in trees:
        counts[tree.slot] = counts.get(tree.slot, 0) + len(tree.ids)
    spans: list[HiddenSpan] = []
    first = 0
    for slot, count in counts.items():
        spans.append(HiddenSpan(slot, first, count))
        first += count
    return tuple(spans)
