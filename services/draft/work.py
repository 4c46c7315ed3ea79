"""What the draft's device thread is asked to do, and what it answers. Plain data, no torch."""

from dataclasses import dataclass

from common.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The target's hidden rows of positions start … start + count − 1 of a slot: rows first, first + 1, … of
    the block that was written in `round`."""

    block: int
    round: int
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Draft for one slot.

    ids: the committed log; its last id is the bonus token. key: (request, generation), which changes when the
    slot gets another owner. invalid_from: drafter state at positions ≥ this may stem from ids that were not
    committed and must be computed again. allocated: positions that may be written below. hidden: what the
    target wrote for this slot since the work before, by position; each is named once, and id start + count is
    known.
    """

    slot: int
    key: tuple[int, int]
    ids: tuple[int, ...]
    invalid_from: int
    allocated: int
    k: int
    sampling: SamplingParams
    hidden: tuple[HiddenRows, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftWork:
    """released: slots whose drafter state is to be dropped first."""

    group: int
    round: int
    rows: tuple[DraftRow, ...]
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Root included: tokens[0] is the bonus token, parents[0] is −1, parents[j] < j."""

    slot: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a drafter answers. faults: what was wrong with hidden rows that were not used, one word each."""

    trees: tuple[Tree, ...]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftResult:
    """faults: as in Drafts."""

    group: int
    round: int
    trees: tuple[Tree, ...]
    error: str = ""
    elapsed_us: int = 0
    faults: tuple[str, ...] = ()
