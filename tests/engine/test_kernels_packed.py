"""Products of packed weights: right, and a row's bits are its own, in every format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.kernels.decoder_cpu import decoder_kernels
from common.kernels.huge_pages import HugePages
from common.kernels.packed import PackedMatrix, QuantisedBlocks

ROWS = 200
FORMATS = ("bf16", "q4", "q8")
SHAPES = [(960, 576), (576, 1536), (100, 64), (5, 32), (33, 96)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weight_of(form: str, shape: tuple[int, int]) -> tuple[torch.Tensor | QuantisedBlocks, torch.Tensor]:
    """A random weight as it is stored, and its values, float64 [out, in]."""
    generator = torch.Generator().manual_seed(shape[0])
    if form == "bf16":
        plain = torch.randn(shape, generator=generator).bfloat16()
        return plain, plain.double()
    blocks = (shape[0], shape[1] // 32)
    scales = (torch.rand(blocks, generator=generator) / 50 + 1e-3).half()
    if form == "q8":
        quants = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int16).to(torch.int8)
        return QuantisedBlocks(scales, None, quants), each_input(scales) * quants.double()
    minima = (-torch.rand(blocks, generator=generator) / 10).half()
    quants = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return QuantisedBlocks(scales, minima, quants), each_input(scales) * quants.double() + each_input(minima)


def each_input(of_blocks: torch.Tensor) -> torch.Tensor:
    return of_blocks.double().repeat_interleave(32, dim=1)


def rows_for(inputs: int) -> torch.Tensor:
    return torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(inputs)).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_stored_values(form: str, shape: tuple[int, int], bias: bool) -> None:
    stored, values = weight_of(form, shape)
    offsets = torch.linspace(-3, 3, shape[0]) if bias else None
    x = rows_for(shape[1])
    expected = x.double() @ values.T + (0 if offsets is None else offsets.double())
    wide = PackedMatrix(decoder_kernels(), HugePages(), stored, offsets, wide=True)(x)
    scale = float(expected.abs().max())
    assert float((wide.double() - expected).abs().max()) < 2e-6 * scale
    narrow = PackedMatrix(decoder_kernels(), HugePages(), stored, offsets)(x)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.usefixtures("threads")
def test_rows_do_not_depend_on_their_number(form: str, shape: tuple[int, int]) -> None:
    layer = PackedMatrix(decoder_kernels(), HugePages(), weight_of(form, shape)[0], wide=True)
    x = rows_for(shape[1])
    expected = torch.cat([layer(row) for row in x.split(1)])
    for rows in [*range(2, 28), 31, 64, 95, 96, 97, 108, 150, ROWS]:
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows
        assert torch.equal(layer(x[ROWS - rows :]), expected[ROWS - rows :]), rows


def test_weights_with_an_odd_number_of_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 7\] cannot be packed: inputs must be even"):
        PackedMatrix(decoder_kernels(), HugePages(), torch.zeros(4, 7).bfloat16())


def test_rows_of_another_kind_are_refused() -> None:
    layer = PackedMatrix(decoder_kernels(), HugePages(), torch.zeros(4, 8).bfloat16())
    for rows in (torch.zeros(2, 8), torch.zeros(2, 6).bfloat16()):
        with pytest.raises(ValueError, match=r"bfloat16 \[rows, 8\] is needed"):
            layer(rows)


def test_a_gate_above_an_up_projection_is_for_the_step_alone() -> None:
    layer = PackedMatrix(decoder_kernels(), HugePages(), torch.zeros(4, 8).bfloat16(), paired=True)
    with pytest.raises(ValueError, match="paired"):
        layer(torch.zeros(1, 8).bfloat16())


def test_tensors_of_one_mapping_do_not_overlap() -> None:
    memory = HugePages(chunk_bytes=4096)
    parts = [memory.allocate(size) for size in (100, 1, 3000, 5000, 64)]
    assert all(not part.any() for part in parts)
    assert all(part.data_ptr() % 64 == 0 for part in parts)
    for value, part in enumerate(parts, start=1):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts] == [[1], [2], [3], [4], [5]]
