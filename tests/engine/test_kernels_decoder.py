"""Compiled kernels agree with their torch references, and a row's bits are its own."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import write_hf

import common.kernels.build
import common.model.load
from common.attention.kv_cache import KvCache
from common.graphs.padded import PaddedBatch
from common.graphs.steps import CapturedSteps, StepMemory
from common.kernels.build import KernelsUnavailable, compiled
from common.kernels.decoder_cpu import INSTRUCTION_SETS, SOURCE, decoder_kernels
from common.kernels.huge_pages import HugePages
from common.kernels.packed import PackedMatrix
from common.model.batch import AttentionSegment, ForwardBatch
from common.model.config import ModelConfig, RopeConfig
from common.model.layers import DecoderLayer, GatedMlp, RmsNorm, SelfAttention
from common.model.load import load_model
from common.model.rope import RopeTable
from common.model.steps import EagerSteps

ROWS = 150
TINY = ModelConfig(
    family="llama",
    vocab_size=ROWS,
    hidden_size=48,
    intermediate_size=70,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    rms_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_context=ROWS,
    tied_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_ids=(0,),
    bos_id=None,
)


def random_rows(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(2).bfloat16()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to a rounding or two of bfloat16 on the way, in terms of the largest value."""
    assert float((found.double() - expected.double()).abs().max() / expected.double().abs().max()) < 2**-6


def packed(*shape: int, seed: int) -> PackedMatrix:
    weight = random_rows(*shape, seed=seed) / shape[1] ** 0.5
    return PackedMatrix(decoder_kernels(), HugePages(), weight)


@dataclass(frozen=True)
class OneLayer:
    """What a step over one layer leaves in memory. entered: the residual stream before it."""

    entered: torch.Tensor
    layer: DecoderLayer
    memory: StepMemory
    cache: KvCache


def one_layer(config: ModelConfig, threads: int, gate_scale: float = 1.0) -> OneLayer:
    """One sequence of ROWS rows, whose position p lies at place 2 · (ROWS − p)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gate_up = random_rows(2 * inner, hidden, seed=4) / hidden**0.5 * gate_scale
    layer = DecoderLayer(
        RmsNorm(random_rows(hidden, seed=1).abs(), 1e-5),
        SelfAttention(
            config.heads,
            config.kv_heads,
            config.head_dim,
            packed(query + 2 * key, hidden, seed=2),
            packed(hidden, query, seed=3),
            None,
        ),
        RmsNorm(random_rows(hidden, seed=5).abs(), 1e-5),
        GatedMlp(
            PackedMatrix(decoder_kernels(), HugePages(), gate_up, paired=True), packed(hidden, inner, seed=6)
        ),
    )
    rope = RopeTable(config.rope, config.head_dim, ROWS)
    embedding = random_rows(ROWS, hidden, seed=7)
    steps = CapturedSteps(decoder_kernels(), config, embedding, (layer,), rope)
    positions = torch.arange(ROWS)
    places = 2 * (ROWS - positions)
    segment = AttentionSegment(positions.view(1, -1), F.pad(places, (0, -ROWS % 64)).view(1, -1))
    batch = ForwardBatch(positions, positions, places, (segment,), positions[:0])
    cache = KvCache.allocate(config, 2 * ROWS + 1, torch.bfloat16)
    memory = StepMemory(config, embedding.clone())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    steps.compute(PaddedBatch.of(batch, ROWS), memory, cache, 1)
    torch.set_num_threads(before)
    return OneLayer(embedding, layer, memory, cache)


@pytest.mark.parametrize(
    ("hidden", "heads"),
    [
        (576, (9, 3, 64)),
        (48, (4, 4, 8)),
        (100, (6, 2, 24)),
        (64, (14, 2, 64)),
        (34, (5, 1, 80)),
        (64, (4, 1, 128)),
        (64, (2, 1, 256)),
    ],
)
def test_a_layer_agrees_with_its_reference_part_by_part(hidden: int, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, head_dim = heads
    config = replace(
        TINY,
        hidden_size=hidden,
        intermediate_size=70,
        heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    found = one_layer(config, threads=2)
    memory, positions = found.memory, torch.arange(ROWS)
    places = 2 * (ROWS - positions)
    own_keys, own_values = found.cache.keys[0, places], found.cache.values[0, places]

    rope = RopeTable(config.rope, head_dim, ROWS).rows(positions, query_heads, kv_heads)
    attention, mlp = found.layer.attention, found.layer.mlp
    split = attention.qkv(found.layer.attention_norm(found.entered)).view(ROWS, -1, head_dim)
    rotated = rope.rotate(split[:, : query_heads + kv_heads], torch.bfloat16)
    queries = memory.qkv[:, : query_heads * head_dim].view(ROWS, query_heads, head_dim)
    assert_close(torch.cat([queries, own_keys], dim=1), rotated)
    assert_close(own_values, split[:, query_heads + kv_heads :])

    each = query_heads // kv_heads
    scores = torch.einsum("qhd,khd->hqk", queries.double(), own_keys.double().repeat_interleave(each, dim=1))
    scores = scores.masked_fill(positions > positions.view(-1, 1), -torch.inf)
    values = own_values.double().repeat_interleave(each, dim=1)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).reshape(ROWS, -1)
    assert_close(memory.attended.double(), expected)

    after = found.entered.double() + attention.output(memory.attended).double()
    normed = found.layer.mlp_norm(after.bfloat16())
    gate_up = normed.double() @ (random_rows(140, hidden, seed=4) / hidden**0.5).double().T
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(memory.active.double(), F.silu(gate) * up)
    left = after + mlp.down(memory.active).double()
    assert_close(memory.residual.double(), left)


@pytest.mark.parametrize("heads", [(9, 3, 64), (5, 1, 80)])
def test_threads_change_no_bit(heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, head_dim = heads
    config = replace(
        TINY, hidden_size=96, intermediate_size=70, heads=query_heads, kv_heads=kv_heads, head_dim=head_dim
    )
    expected = one_layer(config, threads=1)
    for threads in (2, 3, 7):
        found = one_layer(config, threads)
        assert same_bits(found.memory.residual, expected.memory.residual), threads
        assert same_bits(found.cache.keys, expected.cache.keys)
        assert same_bits(found.cache.values, expected.cache.values)


def test_silu_of_large_numbers_is_finite() -> None:
    config = replace(TINY, hidden_size=48, intermediate_size=70, heads=1, kv_heads=1, head_dim=8)
    found = one_layer(config, threads=1, gate_scale=1e4)
    active = found.memory.active
    assert bool(active.isfinite().all())
    assert float(active.abs().max()) > 1e6
    assert bool((active == 0).any())


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
    with ThreadPoolExecutor(2) as starting:  # a lock that processes share holds for threads too
        first, second = starting.map(lambda flags: compiled(source, flags), [(), ()])
    assert first == second == compiled(source, ())
    assert len([command for command in commands if "-o" in command]) == 1
    assert common.kernels.build.load(first).answer() == 42
    assert list(first.parent.glob("*.so")) == [first]
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
