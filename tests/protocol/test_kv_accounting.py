"""Rules of pages, slots and lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.lengths import most_nodes, pages_for, step_positions
from common.kv.pool import PagePool
from common.kv.slots import SlotTable


def test_page_zero_is_never_given_out() -> None:
    assert sorted(PagePool(5, 4).take(4) or []) == [1, 2, 3, 4]


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = PagePool(5, 4)
    assert pool.take(5) is None
    assert pool.free == 4


def test_a_shared_page_returns_when_its_last_reference_is_dropped() -> None:
    pool = PagePool(5, 4)
    (page,) = pool.take(1) or []
    pool.share(page)
    pool.drop(page)
    assert (pool.free, pool.references(page)) == (3, 1)
    pool.drop(page)
    assert pool.free == 4


def test_dropping_a_reference_that_is_not_there_is_an_error() -> None:
    pool = PagePool(5, 4)
    (page,) = pool.take(1) or []
    pool.drop(page)
    with pytest.raises(RuntimeError, match=f"page {page}"):
        pool.drop(page)
    with pytest.raises(RuntimeError, match="page 0"):
        pool.drop(0)


def test_a_free_page_cannot_be_shared() -> None:
    with pytest.raises(RuntimeError, match="page 3"):
        PagePool(5, 4).share(3)


def test_a_slot_is_given_out_with_a_growing_generation() -> None:
    table = SlotTable(2)
    assert table.give() == (1, 1)
    assert table.give() is None
    table.take_back(1)
    assert table.give() == (1, 2)


def test_taking_back_a_slot_twice_is_an_error() -> None:
    table = SlotTable(3)
    slot, _ = table.give() or (0, 0)
    table.take_back(slot)
    with pytest.raises(RuntimeError, match=f"slot {slot}"):
        table.take_back(slot)


@pytest.mark.parametrize("make", [lambda: PagePool(1, 4), lambda: PagePool(4, 0), lambda: SlotTable(1)])
def test_a_pool_or_table_that_could_give_nothing_is_refused(make) -> None:
    with pytest.raises(ValueError, match="needs 2"):
        make()


@given(
    committed=st.integers(1, 200),
    page_size=st.integers(1, 32),
    nodes=st.integers(1, 20),
    limit=st.integers(2, 201),
)
def test_a_reserved_step_holds_all_its_nodes_within_whole_pages_and_the_context(
    committed: int, page_size: int, nodes: int, limit: int
) -> None:
    if committed >= limit:
        return
    pages = pages_for(step_positions(committed, nodes, limit), page_size)
    fit = most_nodes(committed, pages * page_size, nodes, limit)
    assert fit == min(nodes, limit - committed)
    assert committed - 1 + fit <= min(pages * page_size, limit - 1)


def test_without_a_position_for_the_root_no_node_fits() -> None:
    assert most_nodes(committed=9, allocated=8, max_nodes=4, max_model_len=40) == 0
