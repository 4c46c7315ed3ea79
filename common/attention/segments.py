"""Rows of a forward from prefill chunks and token trees: positions, physical places and attention
segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
    positions: list[torch.Tensor] = []
    write_slots: list[torch.Tensor] = []
    segments: list[AttentionSegment] = []
    for chain in chains:
        segments.append(chain_segment(chain, page_size, first_row=len(ids)))
        positions.append(torch.arange(chain.start, chain.start + len(chain.ids)))
        write_slots.append(segments[-1].key_slots[0, chain.start : chain.start + len(chain.ids)])
        ids.extend(chain.ids)
    chain_rows = len(ids)
    if trees:
        segments.append(tree_segment(trees, page_size, first_row=chain_rows))
        for tree in trees:
            first = tree.base - 1
            positions.append(first + torch.tensor(depths(tree.parents)))
            physical = torch.arange(first, first + len(tree.tokens))
            write_slots.append(physical_slots(torch.tensor(tree.pages), physical, page_size))
            ids.extend(tree.tokens)
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.cat(positions) if positions else empty,
        write_slots=torch.cat(write_slots) if write_slots else empty,
        segments=tuple(segments),
        logit_rows=torch.arange(chain_rows, len(ids)),
    )


def chain_segment(chain: Chain, page_size: int, *, first_row: int) -> AttentionSegment:
    """One path whose queries are the chain's rows first_row, first_row + 1, …"""

    end = chain.start + len(chain.ids)
    _check_pages(chain.pages, page_size, end)
    key_slots = torch.zeros(1, _whole_blocks(end), dtype=torch.int64)
    key_slots[0, :end] = physical_slots(torch.tensor(chain.pages), torch.arange(end), page_size)
    return AttentionSegment(torch.arange(first_row, first_row + len(chain.ids)).view(1, -1), key_slots)


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
    nodes = torch.tensor([path + path[-1:] * (longest - len(path)) for path in paths])  # [paths, longest]
    owner = torch.tensor(owners)
    most_pages = max(len(tree.pages) for tree in trees)
    pages = torch.tensor([[*tree.pages, *[0] * (most_pages - len(tree.pages))] for tree in trees])[owner]
    root = torch.tensor([tree.base - 1 for tree in trees])[owner].view(-1, 1)  # logical position of the root
    length = root + torch.tensor([len(path) for path in paths]).view(-1, 1)

    logical = torch.arange(_whole_blocks(int(length.max())))
    depth = (logical - root).clamp(0, longest - 1)
    physical = torch.where(logical < root, logical, root + nodes.gather(1, depth))
    physical = torch.where(logical < length, physical, 0)
    key_slots = pages.gather(1, physical // page_size) * page_size + physical % page_size
    return AttentionSegment(
        rows=nodes + torch.tensor(first_rows).view(-1, 1),
        key_slots=torch.where(logical < length, key_slots, 0),
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


def _whole_blocks(keys: int) -> int:
    return -(-keys // BLOCK) * BLOCK


def _check_pages(pages: Sequence[int], page_size: int, positions: int) -> None:
    if positions > len(pages) * page_size:
        raise ValueError(
            f"{len(pages)} pages of {page_size} do not cover {positions} positions; reserve them first"
        )
