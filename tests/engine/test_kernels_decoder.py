"""Compiled kernels agree with their torch references, and a row's bits are its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import write_hf

import common.kernels.build
import common.model.load
from common.kernels.build import KernelsUnavailable, compiled
from common.kernels.decoder_cpu import INSTRUCTION_SETS, SOURCE, decoder_kernels
from common.model.config import RopeConfig
from common.model.load import load_model
from common.model.rope import RopeTable
from common.model.steps import EagerSteps

ROWS = 150
CLOSE = {"rtol": 2**-7, "atol": 2**-9}
NO_NORMS = (None, None, 0.0)


def random_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(2).bfloat16()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def add_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, threads: int = 2) -> torch.Tensor:
    """[2, rows, size]: the new residual and its norm."""
    residual, normed = x.clone(), torch.full_like(x, torch.nan)
    pointers = [tensor.data_ptr() for tensor in (residual, delta, weight, normed)]
    decoder_kernels().add_norm(*pointers, *x.shape, 1e-5, threads)
    return torch.stack([residual, normed])


@pytest.mark.parametrize("size", [7, 36, 100, 576, 1536])
def test_add_norm(size: int) -> None:
    x, delta, weight = (
        random_rows(ROWS, size),
        random_rows(ROWS, size, seed=2),
        random_rows(size, seed=3).abs_(),
    )
    found = add_norm(x, delta, weight)
    assert same_bits(found[0], x + delta)
    torch.testing.assert_close(found[1], F.rms_norm(x + delta, (size,), weight, 1e-5), **CLOSE)
    assert same_bits(found, add_norm(x, delta, weight, threads=1))
    for first, rows in ((0, 1), (3, 2), (37, 50), (ROWS - 1, 1)):
        own = slice(first, first + rows)
        assert same_bits(add_norm(x[own].clone(), delta[own].clone(), weight), found[:, own])


def silu_mul(gate_up: torch.Tensor, threads: int = 2) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.full((rows, size), torch.nan, dtype=torch.bfloat16)
    decoder_kernels().silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, threads)
    return out


@pytest.mark.parametrize("size", [7, 33, 100, 1536])
def test_silu_mul(size: int) -> None:
    gate_up = random_rows(ROWS, 2 * size)
    gate, up = gate_up.float().chunk(2, dim=-1)
    found = silu_mul(gate_up)
    torch.testing.assert_close(found, (F.silu(gate) * up).bfloat16(), **CLOSE)
    assert same_bits(found, silu_mul(gate_up, threads=1))
    for first, rows in ((0, 1), (3, 2), (37, 50), (ROWS - 1, 1)):
        assert same_bits(silu_mul(gate_up[first : first + rows].clone()), found[first : first + rows])


def test_silu_of_the_same_number_is_the_same_in_every_lane() -> None:
    found = silu_mul(torch.full((3, 2 * 37), 0.7, dtype=torch.bfloat16))
    assert found.unique().numel() == 1


def test_silu_of_large_numbers_is_finite() -> None:
    gate = torch.tensor([[-1e4, -89.0, 0.0, 89.0, 1e4]], dtype=torch.bfloat16)
    found = silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert found[0].tolist() == [0.0, 0.0, 0.0, 89.0, float(gate[0, 4])]


def attention(
    qkv: torch.Tensor, heads: tuple[int, int, int], threads: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and KV memory of one sequence whose position p lies at place 2 · (ROWS − p), in two calls: the
    rows before first, and those from it on."""
    query_heads, kv_heads, head_dim = heads
    rope = RopeTable(RopeConfig(10000.0), head_dim, ROWS)
    key_slots = 2 * (ROWS - torch.arange(ROWS))
    keys, values = torch.full((2, 2 * ROWS + 1, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16)
    out = torch.full((ROWS, query_heads * head_dim), torch.nan, dtype=torch.bfloat16)
    for begin, end in ((0, first), (first, ROWS)):
        if begin == end:
            continue
        part = qkv[begin:end].clone()
        positions = torch.arange(begin, end)
        places, starts = key_slots[begin:end].contiguous(), torch.zeros(end - begin, dtype=torch.int64)
        decoder_kernels().attention(
            part.data_ptr(),
            *NO_NORMS,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            head_dim**-0.5,
            positions.data_ptr(),
            places.data_ptr(),
            starts.data_ptr(),
            key_slots.data_ptr(),
            int((positions + 1).sum()),
            end,
            keys.data_ptr(),
            values.data_ptr(),
            out[begin:end].data_ptr(),
            end - begin,
            *heads,
            threads,
        )
    return out, keys, values


@pytest.mark.parametrize(
    "heads", [(9, 3, 64), (4, 4, 8), (6, 2, 24), (14, 2, 64), (5, 1, 80), (4, 1, 128), (2, 1, 256)]
)
def test_attention(heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, head_dim = heads
    qkv = random_rows(ROWS, (query_heads + 2 * kv_heads) * head_dim)
    out, keys, values = attention(qkv, heads, threads=2)
    for other in (attention(qkv, heads, threads=1), attention(qkv, heads, threads=2, first=ROWS - 1)):
        assert all(same_bits(a, b) for a, b in zip((out, keys, values), other, strict=True))

    positions = torch.arange(ROWS)
    rope = RopeTable(RopeConfig(10000.0), head_dim, ROWS).rows(positions, query_heads, kv_heads)
    split = qkv.view(ROWS, -1, head_dim)
    rotated = rope.rotate(split[:, : query_heads + kv_heads], torch.bfloat16)
    places = 2 * (ROWS - positions)
    assert same_bits(keys[places], rotated[:, query_heads:])
    assert same_bits(values[places], split[:, query_heads + kv_heads :])
    queries = rotated[:, :query_heads].double()
    own_keys, own_values = (
        memory[places].double().repeat_interleave(query_heads // kv_heads, dim=1) for memory in (keys, values)
    )
    scores = torch.einsum("qhd,khd->hqk", queries, own_keys)
    scores = scores.masked_fill(positions > positions.view(-1, 1), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_values).reshape(ROWS, -1)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KERNEL_CACHE", str(tmp_path / "kernels"))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    commands = []
    actual = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        commands.append(command)
        return actual(command, **options)

    monkeypatch.setattr(common.kernels.build.subprocess, "run", counted)
    first, second = compiled(source, ()), compiled(source, ())
    assert first == second
    assert [command for command in commands if "-o" in command] == commands[1:2]
    assert common.kernels.build.load(first).answer() == 42
    assert list(first.parent.iterdir()) == [first]
    assert compiled(source, ("-DOTHER",)) != first


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", r"no C\+\+ compiler \(no-such-compiler\) on PATH; install one"),
        ("false", "failed with status 1"),
    ],
)
def test_a_missing_compiler_is_named(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelsUnavailable, match=message):
        compiled(SOURCE, INSTRUCTION_SETS)


def test_without_kernels_a_model_serves_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable() -> None:
        raise KernelsUnavailable("no C++ compiler; install one")

    write_hf("llama3", tmp_path)
    compiled_model = load_model(tmp_path, dtype=torch.bfloat16, max_positions=64)
    monkeypatch.setattr(common.model.load, "decoder_kernels", unavailable)
    model = load_model(tmp_path, dtype=torch.bfloat16, max_positions=64)
    assert isinstance(model.steps, EagerSteps)
    assert model.steps.numerics != compiled_model.steps.numerics
    assert [record.getMessage() for record in caplog.records] == [
        "no compiled kernels, so every step takes longer and has other bits: no C++ compiler; install one"
    ]
