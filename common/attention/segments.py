"""Rows of a forward from prefill chunks and token trees: positions, physical places and attention
segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.attention.torch_backend import BLOCK
from common.model.batch import AttentionSegment, ForwardBatch


class Chain(Protocol):
    """ids stand at positions start, start + 1, … of the sequence whose KV lies in pages."""

    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def ids(self) -> Sequence[int]: ...


class TokenTree(Protocol):
    """Node j has its KV at physical position base − 1 + j and stands at logical position base − 1 + depth(j).
    parents[0] is −1 and parents[j] < j."""

    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def base(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int]: ...


def build_batch(chains: Sequence[Chain], trees: Sequence[TokenTree], page_size: int) -> ForwardBatch:
    """Rows: the chains' ids one after another, then the trees' nodes; the nodes' logits are wanted, in that
    order.

    Raises ValueError when pages do not cover the positions.
    """

    ids: list[int] = []
    positions: list[int] = []
    write_slots: list[int] = []
    segments: list[AttentionSegment] = []
    for chain in chains:
        segments.append(chain_segment(chain, page_size, first_row=len(ids)))
        end = chain.start + len(chain.ids)
        positions.extend(range(chain.start, end))
        write_slots.extend(_places(chain.pages, chain.start, end, page_size))
        ids.extend(chain.ids)
    chain_rows = len(ids)
    if trees:
        segments.append(tree_segment(trees, page_size, first_row=chain_rows))
        for tree in trees:
            first = tree.base - 1
            positions.extend(first + depth for depth in depths(tree.parents))
            write_slots.extend(_places(tree.pages, first, first + len(tree.tokens), page_size))
            ids.extend(tree.tokens)
    return ForwardBatch(
        ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        write_slots=torch.tensor(write_slots, dtype=torch.int64),
        segments=tuple(segments),
        logit_rows=torch.arange(chain_rows, len(ids)),
    )


def chain_segment(chain: Chain, page_size: int, *, first_row: int) -> AttentionSegment:
    """One path whose queries are the chain's rows first_row, first_row + 1, …"""

    end = chain.start + len(chain.ids)
    _check_pages(chain.pages, page_size, end)
    key_slots = np.zeros((1, _whole_blocks(end)), dtype=np.int64)
    key_slots[0, :end] = _physical(chain.pages, end, page_size)
    rows = torch.arange(first_row, first_row + len(chain.ids)).view(1, -1)
    return AttentionSegment(rows, torch.from_numpy(key_slots))


def tree_segment(trees: Sequence[TokenTree], page_size: int, *, first_row: int) -> AttentionSegment:
    """All root-to-leaf paths of all trees, padded to the longest. The rows of a tree follow those of the tree
    before it, from first_row on."""

    paths: list[list[int]] = []
    owners: list[int] = []
    first_rows: list[int] = []
    row = first_row
    for number, tree in enumerate(trees):
        _check_pages(tree.pages, page_size, tree.base - 1 + len(tree.tokens))
        for path in root_to_leaf_paths(tree.parents):
            paths.append(path)
            owners.append(number)
            first_rows.append(row)
        row += len(tree.tokens)
    longest = max(len(path) for path in paths)
    nodes = np.array([path + path[-1:] * (longest - len(path)) for path in paths])  # [paths, longest]
    longest_path = max(trees[owner].base - 1 + len(path) for owner, path in zip(owners, paths, strict=True))
    key_slots = np.zeros((len(paths), _whole_blocks(longest_path)), dtype=np.int64)
    of_tree: dict[int, npt.NDArray[np.int64]] = {}
    for row_slots, owner, path in zip(key_slots, owners, paths, strict=True):
        tree, root = trees[owner], trees[owner].base - 1
        if owner not in of_tree:
            of_tree[owner] = _physical(tree.pages, root + len(tree.tokens), page_size)
        physical = of_tree[owner]
        row_slots[:root] = physical[:root]
        row_slots[root : root + len(path)] = physical[root:][path]
    return AttentionSegment(
        rows=torch.from_numpy(nodes + np.array(first_rows)[:, None]),
        key_slots=torch.from_numpy(key_slots),
    )


def physical_slots(pages: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Physical token positions of a sequence's positions; both int64 [n]. pages: int64 [pages]."""

    return pages[positions // page_size] * page_size + positions % page_size


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; the root's is 0."""

    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def root_to_leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Node indices from the root to every leaf, by leaf."""

    inner = set(parents)
    paths = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def _physical(pages: Sequence[int], end: int, page_size: int) -> npt.NDArray[np.int64]:
    """Physical token positions of a sequence's positions 0 … end − 1."""

    count = -(-end // page_size)
    firsts = np.array(pages[:count], dtype=np.int64) * page_size
    return (firsts[:, None] + np.arange(page_size)).ravel()[:end]


def _places(pages: Sequence[int], start: int, end: int, page_size: int) -> list[int]:
    return [pages[at // page_size] * page_size + at % page_size for at in range(start, end)]


def _whole_blocks(keys: int) -> int:
    return -(-keys // BLOCK) * BLOCK


def _check_pages(pages: Sequence[int], page_size: int, positions: int) -> None:
    if positions > len(pages) * page_size:
        raise ValueError(
            f"{len(pages)} pages of {page_size} do not cover {positions} positions; reserve them first"
        )
