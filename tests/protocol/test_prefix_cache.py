"""Rules of the prefix cache: what is found, what is forgotten first, and that no page is lost."""

from hypothesis import given
from hypothesis import strategies as st

from common.kv.pool import PagePool
from common.kv.prefix_cache import Chain, PrefixCache, extend_chain

SIZE = 2
ABC = (1, 2, 3, 4, 5, 6)


def make(pages: int = 9) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(pages, SIZE)
    return pool, PrefixCache(pool)


def run(cache: PrefixCache, ids: tuple[int, ...]) -> tuple[list[int], Chain]:
    """Compute all full pages of ids, with what is known of them."""
    full = len(ids) // SIZE
    pages, chain = cache.hold(ids, full)
    pages += cache.take(full - len(pages)) or []
    extend_chain(chain, ids, full, SIZE)
    cache.enter(pages, chain)
    return pages, chain


def found(cache: PrefixCache, ids: tuple[int, ...], most: int = 99) -> list[int]:
    pages, chain = cache.hold(ids, min(most, len(ids) // SIZE))
    cache.let_go(pages, chain)
    return pages


def test_the_longest_known_beginning_is_found() -> None:
    _, cache = make()
    pages, _ = run(cache, ABC)
    assert found(cache, ABC) == pages
    assert found(cache, (1, 2, 3, 4, 9, 9)) == pages[:2]
    assert found(cache, (9, 2, 3, 4, 5, 6)) == []


def test_no_more_is_found_than_was_asked_for() -> None:
    _, cache = make()
    pages, _ = run(cache, ABC)
    assert found(cache, ABC, most=1) == pages[:1]


def test_the_same_ids_behind_another_beginning_are_another_page() -> None:
    _, cache = make()
    run(cache, (1, 2, 5, 6))
    beginning, _ = run(cache, (3, 4))
    assert found(cache, (3, 4, 5, 6)) == beginning


def test_a_page_that_a_slot_holds_is_not_given_out() -> None:
    _, cache = make(pages=4)
    run(cache, ABC)
    assert cache.available == 0
    assert cache.take(1) is None


def test_known_pages_that_nobody_holds_can_be_given_out() -> None:
    pool, cache = make(pages=4)
    cache.let_go(*run(cache, ABC))
    assert (pool.free, cache.available) == (0, 3)
    assert sorted(cache.take(3) or []) == [1, 2, 3]
    assert found(cache, ABC) == []


def test_nothing_is_forgotten_while_free_pages_last_and_no_more_than_is_missing() -> None:
    _, cache = make(pages=6)
    cache.let_go(*run(cache, ABC))
    cache.take(2)
    assert len(found(cache, ABC)) == 3
    cache.take(1)
    assert len(found(cache, ABC)) == 2


def test_taking_more_than_is_available_forgets_nothing() -> None:
    _, cache = make(pages=6)
    cache.let_go(*run(cache, ABC))
    assert cache.take(6) is None
    assert len(found(cache, ABC)) == 3


def test_the_least_recently_used_chain_is_forgotten_first_from_its_end() -> None:
    _, cache = make(pages=6)
    for ids in (ABC, (7, 7, 8, 8)):
        cache.let_go(*run(cache, ids))
    found(cache, ABC)
    cache.take(1)
    assert (len(found(cache, ABC)), len(found(cache, (7, 7, 8, 8)))) == (3, 1)
    cache.take(1)
    assert (len(found(cache, ABC)), len(found(cache, (7, 7, 8, 8)))) == (2, 1)


def test_a_beginning_that_two_chains_share_outlives_both_ends() -> None:
    _, cache = make(pages=5)
    for ids in (ABC, (1, 2, 9, 9)):
        cache.let_go(*run(cache, ids))
    cache.take(3)
    assert len(found(cache, ABC)) == 1


def test_of_two_pages_with_the_same_ids_the_first_stays() -> None:
    pool, cache = make()
    first, second = cache.take(1) or [], cache.take(1) or []
    chain: Chain = []
    extend_chain(chain, ABC, 1, SIZE)
    cache.enter(first, chain)
    cache.enter(second, chain)
    cache.let_go(second, chain)
    assert found(cache, ABC) == first
    assert pool.references(second[0]) == 0


def test_a_beginning_that_was_forgotten_is_known_again_from_a_slot_that_computed_its_own() -> None:
    """Two slots compute the same page; the known one is let go and forgotten while the other slot runs on."""
    pool, cache = make(pages=4)
    first, second = cache.take(1) or [], cache.take(2) or []
    chain: Chain = []
    extend_chain(chain, ABC, 2, SIZE)
    cache.enter(first, chain[:1])
    cache.enter(second, chain)
    cache.let_go(first, chain[:1])
    assert cache.take(1) == first
    assert found(cache, ABC) == []
    cache.enter(second, chain)
    assert found(cache, ABC) == second
    assert pool.free == 0


@given(st.data())
def test_whatever_comes_and_goes_no_page_is_lost_and_what_is_found_has_the_right_ids(
    data: st.DataObject,
) -> None:
    pages = data.draw(st.integers(3, 12))
    pool, cache = make(pages)
    written: dict[int, tuple[int, ...]] = {}
    held: list[tuple[list[int], Chain]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            cache.let_go(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            ids = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
            full = len(ids) // SIZE
            known, chain = cache.hold(ids, full)
            for place, page in enumerate(known):
                assert written[page] == ids[: (place + 1) * SIZE]
            fresh = cache.take(full - len(known))
            if fresh is None:
                cache.let_go(known, chain)
            else:
                mine = known + fresh
                extend_chain(chain, ids, full, SIZE)
                written.update(
                    {page: ids[: (place + 1) * SIZE] for place, page in enumerate(mine) if page in fresh}
                )
                cache.enter(mine, chain)
                held.append((mine, chain))
        in_use = {page for mine, _ in held for page in mine}
        assert cache.available == pages - 1 - len(in_use)
        assert all(pool.references(page) == 1 for page in cache.idle)
    for mine, chain in held:
        cache.let_go(mine, chain)
    assert len(cache.take(pages - 1) or []) == pages - 1
