"""A row of a packed linear layer has the same bits whatever rows come with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.model.linear import MAX_ROWS, MIN_ROWS, PackedBf16Linear, linear

DEMO_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
TINY_SHAPES = [(80, 48), (48, 48), (200, 48), (131, 48), (54, 100), (192, 36), (7, 5), (33, 33)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def layer_and_rows(shape: tuple[int, int], rows: int, *, bias: bool) -> tuple[PackedBf16Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).bfloat16()
    offsets = torch.randn(shape[0], generator=generator).bfloat16() if bias else None
    return PackedBf16Linear(weight, offsets), torch.randn(rows, shape[1], generator=generator).bfloat16()


def in_smallest_calls(layer: PackedBf16Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer(part) for part in x.split(MIN_ROWS)])


@pytest.mark.parametrize("shape", DEMO_SHAPES + TINY_SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_number(shape: tuple[int, int], bias: bool) -> None:
    layer, x = layer_and_rows(shape, MAX_ROWS, bias=bias)
    expected = in_smallest_calls(layer, x)
    for rows in [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 200, 257, 512, 777, MAX_ROWS]:
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows
        last = MAX_ROWS - rows
        assert torch.equal(layer(x[last:]), expected[last:]), rows


@pytest.mark.usefixtures("threads")
def test_rows_of_the_head_do_not_depend_on_their_number() -> None:
    layer, x = layer_and_rows((49152, 576), 64, bias=False)
    expected = in_smallest_calls(layer, x)
    for rows in [1, 2, 3, 5, 8, 16, 17, 33, 64]:
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows


def test_more_rows_than_were_compared_are_split_and_few_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_rows((80, 48), 2 * MAX_ROWS + 1, bias=True)
    expected = torch.cat([layer(x[:3]), layer(x[3:1000]), layer(x[1000:])])
    asked, product = [], PackedBf16Linear._product

    def recorded(self: PackedBf16Linear, rows: torch.Tensor) -> torch.Tensor:
        asked.append(rows.shape[0])
        return product(self, rows)

    monkeypatch.setattr(PackedBf16Linear, "_product", recorded)
    assert torch.equal(layer(x), expected)
    assert asked == [MAX_ROWS, MAX_ROWS, MIN_ROWS]


def test_the_product_is_that_of_the_weights() -> None:
    layer, x = layer_and_rows((131, 48), 20, bias=True)
    generator = torch.Generator().manual_seed(131)
    weight = torch.randn(131, 48, generator=generator).bfloat16().double()
    offsets = torch.randn(131, generator=generator).bfloat16().double()
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T + offsets, rtol=2**-7, atol=2**-6)


def test_a_cpu_without_bfloat16_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="AVX-512"):
        linear(torch.zeros(8, 8), None, torch.bfloat16)


def test_a_dtype_that_is_neither_served_nor_tested_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float16.*bfloat16 serves"):
        linear(torch.zeros(8, 8), None, torch.float16)
