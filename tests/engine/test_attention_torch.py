"""The torch backend against the formula, and what must not leak into it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequences import PAGE, Chain, Tree, chain_tree, pages_for

from common.attention.segments import build_batch
from common.attention.torch_backend import BLOCK, TorchAttention, add_adjacent_pairs
from common.model.batch import ForwardBatch

HEADS, KV_HEADS = 6, 2


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_formula(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One row: queries [heads, D], keys and values [seen, kv_heads, D]. float64 [heads × D]."""
    group = queries.shape[0] // keys.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    weights = torch.softmax(torch.einsum("hd,khd->hk", queries.double(), k), dim=-1)
    return torch.einsum("hk,khd->hd", weights, v).flatten()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_rows_attend_as_the_formula_says(dtype: torch.dtype, tolerance: float, head_dim: int) -> None:
    long, short = pages_for(200, 1), pages_for(40, 20)
    trees = [Tree(long, 130, [1] * 5, [-1, 0, 0, 1, 2]), chain_tree(short, 9, [1] * 3)]
    batch = build_batch([Chain(pages_for(90, 30), 20, [1] * 70)], trees, PAGE)
    rows, positions = batch.ids.shape[0], 40 * PAGE
    queries = random(rows, HEADS, head_dim, dtype=dtype) * head_dim**-0.5
    keys = random(positions, KV_HEADS, head_dim, dtype=dtype, seed=1)
    values = random(positions, KV_HEADS, head_dim, dtype=dtype, seed=2)
    output = TorchAttention(HEADS, KV_HEADS, head_dim).plan(batch).attend(queries, keys, values)
    seen = 0
    for segment in batch.segments:
        for path_rows, slots in zip(segment.rows, segment.key_slots, strict=True):
            for row in path_rows.tolist():
                own = slots[: int(batch.positions[row]) + 1]
                expected = by_formula(queries[row], keys[own], values[own])
                assert (output[row].double() - expected).abs().max() <= tolerance
                seen += 1
    assert seen >= rows


def decode_batch(length: int) -> ForwardBatch:
    return build_batch([], [chain_tree(pages_for(length), length, [1])], PAGE)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_keys_after_the_query_and_padding_have_no_part(garbage: float) -> None:
    length, backend = 70, TorchAttention(HEADS, KV_HEADS, 64)
    queries = random(1, HEADS, 64, dtype=torch.bfloat16)
    keys = random(200, KV_HEADS, 64, dtype=torch.bfloat16, seed=1)
    values = random(200, KV_HEADS, 64, dtype=torch.bfloat16, seed=2)
    batch = decode_batch(length)
    clean = backend.plan(batch).attend(queries, keys, values)
    written = torch.zeros(200, dtype=torch.bool)
    written[batch.segments[0].key_slots[0, :length]] = True
    keys[~written] = garbage
    values[~written] = garbage
    assert torch.equal(backend.plan(batch).attend(queries, keys, values), clean)


def in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a long path is cut off from a short one, which then has no padding."""
    monkeypatch.setattr("common.attention.torch_backend.PIECE_BYTES", 1 << 30)


@pytest.mark.parametrize(("length", "beside"), [(50, 65), (50, 330), (130, 700), (1500, 2900), (40, 4000)])
@pytest.mark.parametrize("scale", [1.0, -1e-38])
def test_more_padding_blocks_change_no_bit(
    length: int, beside: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values so small that products underflow would show the sign of a zero."""
    in_one_piece(monkeypatch)
    backend = TorchAttention(HEADS, KV_HEADS, 64)
    queries = random(1, HEADS, 64, dtype=torch.bfloat16)
    keys, values = (random(4100, KV_HEADS, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    values = (values.float().abs() * scale).bfloat16()
    alone = backend.plan(decode_batch(length)).attend(queries, keys, values)
    trees = [chain_tree(pages_for(end), end, [1]) for end in (length, beside)]
    both = backend.plan(build_batch([], trees, PAGE)).attend(queries.expand(2, -1, -1), keys, values)
    assert torch.equal(both[:1].view(torch.int16), alone.view(torch.int16))


def test_more_padding_blocks_change_no_bit_where_blocks_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block and its opposite, far larger than the rest: another order of the sum would round otherwise."""
    in_one_piece(monkeypatch)
    backend, rows = TorchAttention(HEADS, KV_HEADS, 64), 5
    queries = torch.zeros(rows + 1, HEADS, 64, dtype=torch.bfloat16)
    keys, values = (random(4100, KV_HEADS, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    large = values[PAGE : PAGE + BLOCK] * 2.0**18
    values[PAGE : PAGE + BLOCK] = large
    values[PAGE + 11 * BLOCK : PAGE + 12 * BLOCK] = -large
    mine = chain_tree(pages_for(1500 + rows), 1500, [1] * rows)
    other = chain_tree(pages_for(4000), 4000, [1])
    alone = backend.plan(build_batch([], [mine], PAGE)).attend(queries[:rows], keys, values)
    both = backend.plan(build_batch([], [mine, other], PAGE)).attend(queries, keys, values)
    assert torch.equal(both[:rows], alone)


def test_a_row_in_no_segment_is_refused() -> None:
    batch = build_batch([Chain(pages_for(5), 0, [1, 2, 3])], [], PAGE)
    lone = replace(batch, ids=torch.arange(4), positions=torch.arange(4), write_slots=torch.arange(4))
    with pytest.raises(ValueError, match=r"rows \[3\] stand in no attention segment"):
        TorchAttention(HEADS, KV_HEADS, 8).plan(lone)


def test_a_query_behind_its_keys_is_refused() -> None:
    batch = build_batch([Chain(pages_for(64), 60, [1])], [], PAGE)
    with pytest.raises(ValueError, match="position 128 or later has only 64 keys"):
        TorchAttention(HEADS, KV_HEADS, 8).plan(replace(batch, positions=torch.tensor([130])))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 13])
def test_pairs_are_added_as_a_tree_that_trailing_zeros_leave_alone(count: int) -> None:
    terms = random(4, count, 9, dtype=torch.float32, seed=count)

    def by_tree(values: list[torch.Tensor]) -> torch.Tensor:
        while len(values) > 1:
            values = [*values, *([torch.zeros_like(values[0])] if len(values) % 2 else [])]
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    expected = by_tree(list(terms.unbind(1)))
    padded = torch.cat([terms, torch.zeros(4, 16 - count, 9)], dim=1)
    assert torch.equal(add_adjacent_pairs(terms.clone()), expected)
    assert torch.equal(add_adjacent_pairs(padded), expected)


def long_segment_temporaries(backend: TorchAttention, batch: ForwardBatch) -> int:
    plan = backend.plan(batch)
    return max(
        piece.paths * piece.queries * piece.blocks * BLOCK * backend.heads * 10 for piece in plan.pieces
    )


def test_a_long_chunk_is_cut_so_that_temporaries_stay_small() -> None:
    backend = TorchAttention(9, 3, 64)
    batch = build_batch([Chain(pages_for(8192), 7680, [1] * 512)], [], PAGE)
    assert long_segment_temporaries(backend, batch) < 64 << 20
    trees = [chain_tree(pages_for(4000), 3990, [1] * 5) for _ in range(32)]
    assert long_segment_temporaries(backend, build_batch([], trees, PAGE)) < 64 << 20
