"""Which layers a step hands out, and where to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sequences import Chain, empty_cache, run
from tiny_models import write_hf

from common.attention.segments import build_batch
from common.graphs.steps import CapturedSteps
from common.model.llama import LlamaModel
from common.model.load import build_model, load_model, open_checkpoint
from common.model.steps import CapturedRows

HIDDEN = 96
IDS = [5, 6, 7, 8, 9, 10, 11, 12, 13]
"""Nine rows, which a step of ten computes."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama2")
    write_hf("llama2", made)
    return made


@pytest.fixture(scope="module")
def compiled(directory: Path) -> LlamaModel:
    model = load_model(directory, dtype=torch.bfloat16, max_positions=256)
    assert isinstance(model.steps, CapturedSteps)
    return model


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request: pytest.FixtureRequest, directory: Path, compiled: LlamaModel) -> LlamaModel:
    if request.param == "compiled":
        return compiled
    return build_model(open_checkpoint(directory), dtype=torch.bfloat16, max_positions=256)


def test_a_layer_may_be_captured_twice(model: LlamaModel) -> None:
    """As an EAGLE-3 head of a target with six layers asks for: 2, 3 and 3."""

    captured = run(model, empty_cache(model, 64), [Chain([1], 0, IDS)], capture=(1, 0, 1)).captured
    assert captured is not None
    first, second, third = captured.chunk(3, dim=-1)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert torch.equal(second, model.embedding[IDS]), "what enters layer 0"


def test_what_is_not_asked_for_is_left_as_it_is(model: LlamaModel) -> None:
    """Places of a row behind the layers, and rows behind the padding."""

    rows = torch.full((12, 3 * HIDDEN), torch.nan, dtype=torch.bfloat16)
    batch = build_batch([Chain([1], 0, IDS)], [], 16)
    model.forward(batch, empty_cache(model, 64), capture=CapturedRows((1, 0), rows))
    wanted = run(model, empty_cache(model, 64), [Chain([1], 0, IDS)], capture=(1, 0)).captured
    assert wanted is not None
    assert torch.equal(rows[:9, : 2 * HIDDEN], wanted)
    assert rows[:, 2 * HIDDEN :].isnan().all()
    assert rows[10:].isnan().all()


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(10, 2 * HIDDEN),
        torch.zeros(9, 2 * HIDDEN, dtype=torch.bfloat16),
        torch.zeros(10, HIDDEN, dtype=torch.bfloat16),
        torch.zeros(10, 2 * HIDDEN + 1, dtype=torch.bfloat16),
        torch.zeros(2 * HIDDEN, 10, dtype=torch.bfloat16).T,
    ],
    ids=["another dtype", "no row for padding", "one layer's width", "a broken place", "not contiguous"],
)
def test_rows_without_room_are_refused_before_anything_is_written(
    rows: torch.Tensor, compiled: LlamaModel
) -> None:
    cache = empty_cache(compiled, 64)
    batch = build_batch([Chain([1], 0, IDS)], [], 16)
    with pytest.raises(ValueError, match=r"10 rows of 2 layers need torch.bfloat16 \[10, 192\]"):
        compiled.forward(batch, cache, capture=CapturedRows((0, 1), rows))
    assert not cache.keys.any()
    assert not rows.any()
