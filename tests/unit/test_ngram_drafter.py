from common.sampling.params import SamplingParams
from services.draft.drafters.ngram import NgramDrafter
from services.draft.work import DraftRow, DraftWork, Tree


def _row(ids: list[int], k: int = 4, slot: int = 1, key: tuple[int, int] = (1, 1)) -> DraftRow:
    return DraftRow(slot, key, tuple(ids), len(ids), 1000, k, SamplingParams())


def _draft(drafter: NgramDrafter, *rows: DraftRow, released: tuple[int, ...] = ()) -> tuple[Tree, ...]:
    return drafter.draft(DraftWork(0, 1, rows, released)).trees


def test_it_proposes_what_followed_the_last_occurrence() -> None:
    drafter = NgramDrafter(100, "t")
    (tree,) = _draft(drafter, _row([1, 2, 3, 4, 9, 1, 2, 7, 8, 1, 2], k=2))
    assert tree == Tree(1, (2, 7, 8), (-1, 0, 1))


def test_the_longest_match_wins_over_the_latest() -> None:
    drafter = NgramDrafter(100, "t")
    (tree,) = _draft(drafter, _row([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], k=1))
    assert tree.tokens == (2, 3)


def test_a_copy_that_reaches_the_end_repeats_the_period() -> None:
    drafter = NgramDrafter(100, "t")
    (tree,) = _draft(drafter, _row([1, 2, 3, 1, 2, 3], k=5))
    assert tree.tokens == (3, 1, 2, 3, 1, 2)


def test_text_without_a_repeat_gets_no_proposal() -> None:
    assert _draft(NgramDrafter(100, "t"), _row([1, 2, 3, 4])) == ()


def test_growing_a_log_step_by_step_equals_taking_it_in_at_once() -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4]
    grown = NgramDrafter(100, "t")
    for end in range(1, len(ids) + 1):
        at_once = NgramDrafter(100, "t")
        assert _draft(grown, _row(ids[:end])) == _draft(at_once, _row(ids[:end]))


def test_a_slot_with_a_new_owner_forgets_the_old_text() -> None:
    drafter = NgramDrafter(100, "t")
    _draft(drafter, _row([1, 2, 3, 1, 2]))
    assert _draft(drafter, _row([8, 9, 1, 2], key=(2, 2))) == ()


def test_a_released_slot_is_forgotten() -> None:
    drafter = NgramDrafter(100, "t")
    _draft(drafter, _row([1, 2, 3, 1, 2]))
    assert _draft(drafter, _row([7, 1, 2]), released=(1,)) == ()
