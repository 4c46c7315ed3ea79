"""Chains and trees become rows, physical places and paths."""

from __future__ import annotations

import pytest
import torch
from sequences import PAGE, Chain, Tree, chain_tree

from common.attention.segments import build_batch, chain_segment, depths, root_to_leaf_paths, tree_segment

PAGES = [7, 3, 9, 4, 12]


def slot(position: int, pages: list[int] = PAGES) -> int:
    return pages[position // PAGE] * PAGE + position % PAGE


def test_a_chain_is_one_path_over_all_positions_before_its_end() -> None:
    segment = chain_segment(Chain(PAGES, 30, [1] * 40), PAGE, first_row=5)
    assert segment.rows.tolist() == [list(range(5, 45))]
    assert segment.key_slots.shape == (1, 128)
    assert segment.key_slots[0, :70].tolist() == [slot(position) for position in range(70)]
    assert not segment.key_slots[0, 70:].any()


def test_a_tree_of_width_one_is_one_path() -> None:
    segment = tree_segment([chain_tree(PAGES, 20, [5, 6, 7])], PAGE, first_row=2)
    assert segment.rows.tolist() == [[2, 3, 4]]
    assert segment.key_slots[0, :22].tolist() == [slot(position) for position in range(22)]
    assert segment.key_slots.shape == (1, 64)


def test_a_path_sees_the_committed_positions_and_its_own_nodes() -> None:
    tree = Tree(PAGES, 41, [10, 11, 12, 13, 14], [-1, 0, 0, 2, 1])
    segment = tree_segment([tree], PAGE, first_row=0)
    assert segment.rows.tolist() == [[0, 2, 3], [0, 1, 4]]
    committed = [slot(position) for position in range(40)]
    assert segment.key_slots[0, :43].tolist() == [*committed, slot(40), slot(42), slot(43)]
    assert segment.key_slots[1, :43].tolist() == [*committed, slot(40), slot(41), slot(44)]


def test_trees_of_several_slots_are_padded_to_one_segment() -> None:
    other = [20, 21, 22, 23, 24, 25]
    segment = tree_segment([chain_tree(PAGES, 1, [1]), chain_tree(other, 66, [2, 3])], PAGE, first_row=0)
    assert segment.rows.tolist() == [[0, 0], [1, 2]]
    assert segment.key_slots.shape == (2, 128)
    assert segment.key_slots[0, 0] == slot(0)
    assert not segment.key_slots[0, 1:].any()
    assert segment.key_slots[1, :67].tolist() == [slot(position, other) for position in range(67)]
    assert not segment.key_slots[1, 67:].any()


def test_a_batch_has_chunks_first_and_wants_the_trees_logits() -> None:
    tree = Tree(PAGES, 34, [8, 9, 10], [-1, 0, 0])
    batch = build_batch([Chain(PAGES, 31, [5, 6])], [tree], PAGE)
    assert batch.ids.tolist() == [5, 6, 8, 9, 10]
    assert batch.positions.tolist() == [31, 32, 33, 34, 34]
    assert batch.write_slots.tolist() == [slot(position) for position in (31, 32, 33, 34, 35)]
    assert batch.logit_rows.tolist() == [2, 3, 4]
    assert len(batch.segments) == 2


def test_an_empty_batch_has_no_rows() -> None:
    batch = build_batch([], [], PAGE)
    assert batch.ids.dtype == torch.int64
    assert batch.ids.numel() == batch.logit_rows.numel() == len(batch.segments) == 0


@pytest.mark.parametrize("rows", [[Chain([1], 10, [1] * 7)], [chain_tree([1], 16, [1, 2])]])
def test_positions_beyond_the_pages_are_refused(rows: list) -> None:
    chains, trees = (rows, []) if isinstance(rows[0], Chain) else ([], rows)
    with pytest.raises(ValueError, match="1 pages of 16 do not cover 17 positions"):
        build_batch(chains, trees, PAGE)


def test_paths_and_depths_of_a_tree() -> None:
    parents = [-1, 0, 1, 0, 3, 3]
    assert depths(parents) == [0, 1, 2, 1, 2, 2]
    assert root_to_leaf_paths(parents) == [[0, 1, 2], [0, 3, 4], [0, 3, 5]]
