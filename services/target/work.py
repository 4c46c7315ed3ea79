"""What the target's device thread is asked to do in one round, and what it answers. Plain data, no torch."""

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
class RoundWork:
    """A slot's chunk comes before its tree in the same forward when both are there."""

    group: int
    round: int
    chunks: tuple[PrefillChunk, ...]
    trees: tuple[TreeRows, ...]


@dataclass(frozen=True, slots=True)
class TreeResult:
    """ids: accepted path, then the new bonus token. The accepted path's KV is at its logical positions."""

    slot: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """error is set when the forward failed: then no row has a result."""

    group: int
    round: int
    trees: tuple[TreeResult, ...]
    elapsed_us: int
    error: str = ""
