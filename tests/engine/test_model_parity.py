"""Logits of every family against transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from sequences import Chain, chain_tree, empty_cache, pages_for, run
from tiny_models import CONTEXT, FAMILIES, LLAMA3_ROPE, random_model, write_gguf, write_hf

from common.model.checkpoint import expected_shapes
from common.model.config import llama3_divisors
from common.model.linears import has_int4
from common.model.load import load_model, open_checkpoint
from common.model.plan import cpu_plan

LENGTH = 150
TOLERANCE = 1e-4
Types = gguf.GGMLQuantizationType


def some_ids(length: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference <= tolerance


def assert_same_model(path: Path, reference) -> None:
    model = load_model(path, dtype=torch.float32, max_positions=CONTEXT)
    ids = some_ids(LENGTH, model.config.vocab_size)
    cache = empty_cache(model, 2 * CONTEXT, fill=torch.nan)
    logits = run(model, cache, [Chain(pages_for(CONTEXT), 0, ids)]).logits
    assert_close(logits, reference_logits(reference, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    assert_same_model(tmp_path, write_hf(family, tmp_path))


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    reference = write_hf("llama3", tmp_path, shard_bytes="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_model(tmp_path, reference)


@pytest.mark.parametrize("family", ["llama2", "smollm2", "mistral", "qwen2", "qwen3", "llama-biases"])
def test_a_gguf_gives_the_logits_of_the_model_it_was_made_from(family: str, tmp_path: Path) -> None:
    reference = random_model(family)
    write_gguf(reference, tmp_path / "model.gguf")
    assert_same_model(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("kind", [Types.F16, Types.BF16, Types.Q8_0, Types.Q4_0, Types.Q4_1, Types.Q5_0])
def test_a_quantised_gguf_gives_the_logits_of_its_dequantised_weights(kind: Types, tmp_path: Path) -> None:
    reference = random_model("qwen2")
    write_gguf(reference, tmp_path / "model.gguf", kind)
    assert_same_model(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("family", ["qwen2", "llama2"])
@pytest.mark.parametrize("kind", [Types.Q4_0, Types.Q4_1, Types.Q8_0])
def test_the_blocks_of_a_gguf_stand_for_its_dequantised_weights(
    family: str, kind: Types, tmp_path: Path
) -> None:
    write_gguf(random_model(family), tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    found = []
    for name in expected_shapes(checkpoint.config):
        blocks = checkpoint.blocks(name)
        if blocks is None:
            continue
        assert (blocks.minima is None) == (kind == Types.Q8_0)
        values = blocks.scales.float().repeat_interleave(32, dim=1) * blocks.quants.float()
        if blocks.minima is not None:
            values += blocks.minima.float().repeat_interleave(32, dim=1)
        torch.testing.assert_close(values, checkpoint.tensor(name), rtol=1e-6, atol=1e-8)
        found.append(name)
    assert any("q_proj" in name for name in found)
    assert any("k_proj" in name for name in found)
    assert has_int4(checkpoint) == (kind != Types.Q8_0)


def test_auto_weights_are_int4_where_the_file_has_them(tmp_path: Path) -> None:
    write_gguf(random_model("qwen2"), tmp_path / "four.gguf", Types.Q4_1)
    write_gguf(random_model("qwen2"), tmp_path / "eight.gguf", Types.Q8_0)
    for name, weights in (("four", "int4"), ("eight", "bf16")):
        path = tmp_path / f"{name}.gguf"
        model = load_model(path, dtype=torch.bfloat16, max_positions=64, weights="auto")
        assert model.weights == f"{weights}-packed"
    plans = {
        cpu_plan(path, load_model(path, dtype=torch.bfloat16, max_positions=64, weights=weights)).fingerprint
        for weights in ("bf16", "int4", "auto")
        for path in [tmp_path / "four.gguf"]
    }
    assert len(plans) == 2


def test_rope_factors_of_a_gguf_are_honoured(tmp_path: Path) -> None:
    reference = random_model("llama3")
    divisors = llama3_divisors(
        LLAMA3_ROPE["rope_theta"], 8, factor=8.0, low_freq=1.0, high_freq=4.0, original_context=64
    )
    assert min(divisors) == 1.0
    assert max(divisors) == 8.0
    write_gguf(reference, tmp_path / "model.gguf", rope_freqs=list(divisors))
    assert_same_model(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_verified_tree_has_the_logits_of_its_paths(family: str, tmp_path: Path) -> None:
    reference = write_hf(family, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, max_positions=CONTEXT)
    log, branch_a, branch_b = some_ids(70, 131), some_ids(4, 131, 1), some_ids(3, 131, 2)
    cache = empty_cache(model, 2 * CONTEXT, fill=torch.nan)
    pages = pages_for(CONTEXT, 5)
    run(model, cache, [Chain(pages, 0, log[:-1])])
    tree = chain_tree(pages, len(log), [log[-1], *branch_a, *branch_b])
    tree = type(tree)(tree.pages, tree.base, tree.tokens, [-1, 0, 1, 2, 3, 1, 5, 6])
    logits = run(model, cache, trees=[tree]).logits
    path_a, path_b = [*log, *branch_a], [*log, branch_a[0], *branch_b]
    assert_close(logits[:5], reference_logits(reference, path_a)[69:])
    assert_close(logits[5:], reference_logits(reference, path_b)[71:])


def test_captured_rows_are_the_residual_stream_that_enters_the_layers(tmp_path: Path) -> None:
    reference = write_hf("llama3", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, max_positions=CONTEXT)
    ids = some_ids(90, 131)
    captured = run(
        model, empty_cache(model, CONTEXT + 16), [Chain(pages_for(CONTEXT), 0, ids)], capture=(2, 0)
    ).captured
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    assert_close(captured, torch.cat([states[2][0], states[0][0]], dim=-1))


def test_nothing_is_captured_unless_asked(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, max_positions=CONTEXT)
    cache = empty_cache(model, CONTEXT)
    chain = [Chain(pages_for(5), 0, [1, 2, 3])]
    assert run(model, cache, chain, capture=(0,)).captured is not None
    assert run(model, cache, chain).captured is None
