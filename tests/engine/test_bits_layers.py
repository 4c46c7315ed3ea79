"""What a layer does between its products gives a row the same bits wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from common.model.config import RopeConfig
from common.model.layers import RmsNorm, silu_float32
from common.model.rope import RopeTable

ROWS = 400


@pytest.fixture(params=[1, 2], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random_rows(*shape: int) -> torch.Tensor:
    return torch.randn((ROWS, *shape), generator=torch.Generator().manual_seed(7)).mul_(3).bfloat16()


def assert_rows_are_independent(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    whole = function(x)
    for rows in (1, 2, 3, 5, 7, 16, 33, 100, 333, ROWS):
        for first in (0, 1, 37, ROWS - rows):
            part = function(x[first : first + rows])
            expected = whole[first : first + rows]
            assert torch.equal(part, expected[: part.shape[0]]), (rows, first)


@pytest.mark.parametrize("size", [36, 54, 100, 576, 1536, 4096])
def test_rms_norm(size: int) -> None:
    norm = RmsNorm(random_rows(size)[0], 1e-5)
    x = random_rows(size)
    assert_rows_are_independent(norm, x)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("size", [7, 33, 100, 1536])
def test_silu(size: int) -> None:
    x = random_rows(2 * size)

    def gate(rows: torch.Tensor) -> torch.Tensor:
        return silu_float32(rows.chunk(2, dim=-1)[0])

    assert_rows_are_independent(gate, x)
    torch.testing.assert_close(gate(x).double(), torch.nn.functional.silu(x[:, :size].double()))


def test_silu_of_large_numbers_is_finite() -> None:
    x = torch.tensor([-1e4, -89.0, 0.0, 89.0, 1e4], dtype=torch.bfloat16)
    assert silu_float32(x).tolist() == pytest.approx([0.0, 0.0, 0.0, 89.0, float(x[4])])


@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_rotation(head_dim: int) -> None:
    table = RopeTable(RopeConfig(10000.0), head_dim, ROWS)
    x = random_rows(12, head_dim)[:, :9]
    positions = torch.arange(ROWS)
    whole = table.rows(positions, 6, 3).rotate(x, torch.bfloat16)
    for rows in (1, 2, 3, 7, 64, 333):
        first = ROWS - rows
        part = table.rows(positions[first:], 6, 3).rotate(x[first:], torch.bfloat16)
        assert torch.equal(part, whole[first:]), rows


def test_a_longer_table_has_the_same_rows() -> None:
    short, long = (RopeTable(RopeConfig(10000.0), 64, length) for length in (ROWS, 3 * ROWS + 1))
    positions = torch.arange(ROWS)
    a, b = short.rows(positions, 6, 3), long.rows(positions, 6, 3)
    assert torch.equal(a.cos, b.cos)
    assert torch.equal(a.sin, b.sin)
