"""Padded steps: the view of a batch that captured execution takes, and what padding must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import sequences
import torch
from sequences import PAGE, Chain, chain_tree, empty_cache, pages_for, run
from tiny_models import write_hf

import common.graphs.steps
from common.attention.kv_cache import KvCache
from common.attention.segments import build_batch
from common.graphs.padded import PaddedBatch, padded_rows
from common.graphs.steps import CapturedSteps
from common.model.batch import AttentionSegment, ForwardBatch
from common.model.llama import LlamaModel
from common.model.load import build_model, load_model, open_checkpoint


def two_rows() -> ForwardBatch:
    """One-row slots that see 10 and 11 keys."""
    return build_batch([], [chain_tree([1], 10, [7]), chain_tree([2], 11, [8])], PAGE)


def test_padded_lengths_and_their_sum_agree() -> None:
    padded = PaddedBatch.of(two_rows(), 4)
    assert padded.raw_rows == 2
    assert padded.rows == 4
    assert padded.kv_lens.tolist() == [10, 11, 1, 1]
    assert padded.kv_len_sum == 23
    exact = PaddedBatch.of(two_rows(), 2)
    assert exact.kv_lens.tolist() == [10, 11]
    assert exact.kv_len_sum == 21


def test_padding_rows_stand_at_the_position_that_is_never_given_out() -> None:
    padded = PaddedBatch.of(two_rows(), 4)
    assert padded.positions.tolist() == [9, 10, 0, 0]
    assert padded.write_slots.tolist() == [PAGE + 9, 2 * PAGE + 10, 0, 0]
    assert padded.key_slots[padded.key_starts[2:]].tolist() == [0, 0]
    first = padded.key_slots[padded.key_starts[0] :][:10].tolist()
    assert first == list(range(PAGE, PAGE + 10))


def test_the_callers_batch_is_not_changed() -> None:
    batch, same = two_rows(), two_rows()
    PaddedBatch.of(batch, 8).positions.fill_(3)
    PaddedBatch.of(batch, 2).kv_lens.fill_(3)
    for field in fields(batch):
        found, expected = getattr(batch, field.name), getattr(same, field.name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected), field.name
    assert torch.equal(batch.segments[0].key_slots, same.segments[0].key_slots)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows do not fit a step of 1"):
        PaddedBatch.of(two_rows(), 1)


def test_rows_without_keys_are_refused() -> None:
    ids = torch.tensor([1, 2])
    segment = AttentionSegment(torch.tensor([[0]]), torch.zeros(1, 64, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rows \[1\] stand in no attention segment"):
        PaddedBatch.of(ForwardBatch(ids, ids, ids, (segment,), ids[:0]), 4)
    with pytest.raises(ValueError, match="row 0 at position 64 has only 64 keys"):
        PaddedBatch.of(ForwardBatch(ids[:1], ids[:1] + 63, ids[:1], (segment,), ids[:0]), 4)


def test_sizes_are_few_and_never_below_the_rows() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 1025)}
    assert sizes == {*range(1, 9), 10, 12, 14, 16, 20, 24, *range(32, 1025, 16)}
    assert all(padded_rows(rows) >= rows for rows in range(1, 1500))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    directory = tmp_path_factory.mktemp("qwen3")
    write_hf("qwen3", directory)
    model = load_model(directory, dtype=torch.bfloat16, max_positions=256)
    assert isinstance(model.steps, CapturedSteps)
    return model


def test_captured_steps_agree_with_eager_layers_up_to_rounding(tmp_path: Path) -> None:
    write_hf("qwen3-biases", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    eager = build_model(checkpoint, dtype=torch.bfloat16, max_positions=256)
    captured = load_model(tmp_path, dtype=torch.bfloat16, max_positions=256)
    assert isinstance(captured.steps, CapturedSteps)
    for expected, found in zip(forward(eager)[:2], forward(captured)[:2], strict=True):
        assert float((found - expected).abs().max() / expected.abs().max()) < 2**-5


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Whatever torch allocates without writing it holds NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def forward(model: LlamaModel) -> tuple[torch.Tensor, torch.Tensor, KvCache]:
    cache = empty_cache(model, 8 * PAGE, fill=torch.nan)
    chains = [Chain(pages_for(5), 0, [3, 1, 4, 1, 5])]
    output = run(model, cache, chains, [chain_tree([4], 1, [9, 2])], capture=(0, 1))
    assert output.captured is not None
    return output.logits, output.captured, cache


@pytest.mark.usefixtures("poisoned_memory")
def test_padding_changes_no_bit_and_shows_nowhere(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = None
    for size in (8, 16, 64, 300):
        for user in (common.graphs.steps, sequences):
            monkeypatch.setattr(user, "padded_rows", lambda rows, size=size: size)
        logits, captured, cache = forward(model)
        assert logits.shape[0] == captured.shape[0] == 7
        assert not logits.isnan().any()
        assert not captured.isnan().any()
        own = torch.cat([cache.keys[:, PAGE : PAGE + 5], cache.values[:, 4 * PAGE : 4 * PAGE + 2]], dim=1)
        assert cache.keys[:, PAGE + 5 : 4 * PAGE].isnan().all(), "a row wrote where it does not stand"
        found = (logits, captured, own)
        if expected is None:
            expected = found
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), size


def test_warming_goes_through_every_size_up_to_the_largest(model: LlamaModel) -> None:
    assert isinstance(model.steps, CapturedSteps)
    told: list[tuple[int, int]] = []
    model.steps.warm(100, lambda done, sizes: told.append((done, sizes)))
    assert told == [(done, 20) for done in range(1, 21)]
