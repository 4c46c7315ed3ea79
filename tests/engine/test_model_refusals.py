"""What the engine does not compute or cannot find is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sequences import Chain, captured_rows, empty_cache, pages_for, run
from tiny_models import CONTEXT, FAMILIES, LLAMA3_ROPE, random_model, write_gguf, write_hf

from common.attention.kv_cache import KvCache
from common.attention.segments import build_batch
from common.model.checkpoint import CheckpointError
from common.model.config import UnsupportedModelError
from common.model.config_gguf import parse_gguf_config
from common.model.config_hf import parse_hf_config, read_hf_config
from common.model.gguf_tensors import READABLE, GgufFile
from common.model.llama import LlamaModel
from common.model.load import load_model, open_checkpoint


def raw_config(family: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return FAMILIES[family]().to_dict() | {"architectures": [architecture]} | changes


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (raw_config("llama2", "GPTNeoXForCausalLM"), "GPTNeoXForCausalLM is not supported"),
        (raw_config("llama2", "LlamaForCausalLM", hidden_act="gelu"), "hidden_act 'gelu'"),
        (raw_config("llama2", "LlamaForCausalLM", rope_parameters={"rope_type": "yarn"}), "RoPE type 'yarn'"),
        (
            raw_config("llama2", "LlamaForCausalLM", rope_parameters=None, rope_scaling={"type": "dynamic"}),
            "RoPE type 'dynamic'",
        ),
        (
            raw_config("llama2", "LlamaForCausalLM", rope_parameters={"rope_type": "llama3", "factor": 8.0}),
            "llama3 RoPE scaling without low_freq_factor",
        ),
        (raw_config("llama2", "LlamaForCausalLM", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (raw_config("llama2", "LlamaForCausalLM", head_dim=20), "head_dim is 20; multiples of 8"),
        (raw_config("llama2", "LlamaForCausalLM", num_key_value_heads=4), "6 heads do not divide into 4"),
        (raw_config("llama2", "LlamaForCausalLM", vocab_size="131"), "vocab_size is '131'"),
        (raw_config("mistral", "MistralForCausalLM", sliding_window=128), "sliding_window 128 is below"),
        (
            raw_config("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64),
            "sliding_window 64",
        ),
        (raw_config("qwen3", "Qwen3ForCausalLM", layer_types=["sliding_attention"]), "sliding_attention"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse_hf_config(raw, eos_ids=())


@pytest.mark.parametrize(
    "raw",
    [
        raw_config("mistral", "MistralForCausalLM", sliding_window=None),
        raw_config("mistral", "MistralForCausalLM", sliding_window=CONTEXT),
        raw_config("qwen2", "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=64),
    ],
)
def test_a_window_that_is_off_or_as_long_as_the_context_is_fine(raw: dict[str, Any]) -> None:
    assert parse_hf_config(raw, eos_ids=()).max_context == CONTEXT


def test_older_configs_say_the_same() -> None:
    new = raw_config("llama3", "LlamaForCausalLM")
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = new | {"rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": scaling}
    del old["rope_parameters"]
    assert parse_hf_config(old, eos_ids=()) == parse_hf_config(new, eos_ids=())


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    config = read_hf_config(tmp_path)
    assert (config.eos_ids, config.bos_id) == ((2, 5), 1)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), r"model\.extra is not part"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(95)}),
            r"model\.norm\.weight has shape \[95\].*\[96\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(96).int()}),
            r"model\.norm\.weight is stored as .*int32",
        ),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(change: Callable[..., None], named: str, tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path, dtype=torch.float32, max_positions=64)


def test_old_frequencies_and_a_written_tied_head_are_not_read(tmp_path: Path) -> None:
    write_hf("smollm2", tmp_path)
    freqs, head = "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"
    rewrite(tmp_path, lambda t: t.update({freqs: torch.zeros(8), head: torch.zeros(131, 63)}))
    model = load_model(tmp_path, dtype=torch.float32, max_positions=64)
    assert run(model, empty_cache(model, 32), [Chain(pages_for(3), 0, [1, 2, 3])]).logits.abs().max() > 0


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors weights are read"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path, shard_bytes=40_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        open_checkpoint(tmp_path)


def test_a_shard_outside_the_directory_is_refused(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../x.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="lies outside"):
        open_checkpoint(tmp_path)


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        open_checkpoint(tmp_path)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    write_gguf(random_model("llama2"), tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("size", [0, 3, 100, 5000, -1])
def test_a_cut_off_gguf_is_refused(size: int, tiny_gguf: Path) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(tiny_gguf)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3'"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.rope.dimension_count": 4}, "dimension_count is 4"),
        ({"llama.attention.sliding_window": 128}, "sliding_window 128"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.attention.head_count": [6, 6]}, "differs by layer"),
    ],
)
def test_gguf_metadata_that_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], named: str, tiny_gguf: Path
) -> None:
    file = GgufFile(tiny_gguf)
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    with pytest.raises(UnsupportedModelError, match=named):
        parse_gguf_config(file.metadata | changes, shapes, ())


@pytest.mark.parametrize("kind", READABLE)
def test_every_readable_gguf_type_is_dequantised(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    # Bytes 0 … 59 make finite float16 scales in every block layout.
    raw = np.random.default_rng(0).integers(0, 60, (3, 512 // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    plain = {"F32": np.float32, "F16": np.float16}
    writer.add_tensor("t", raw.view(plain[kind]) if kind in plain else raw, raw_dtype=number)
    writer.add_tensor("after", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    assert torch.equal(file.float32("after"), torch.arange(4.0))
    values = file.float32("t")
    assert values.shape == (3, 512)
    assert values.isfinite().all()
    expected = gguf.quants.dequantize(raw.view(plain[kind]) if kind in plain else raw, number)
    assert torch.equal(values, torch.from_numpy(expected.astype(np.float32)))


def test_a_gguf_type_that_is_not_readable_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("t", np.zeros((1, 66), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="tensor t has type IQ2_XXS"):
        GgufFile(tmp_path / "one.gguf")


@pytest.mark.parametrize("positions", [0, CONTEXT + 1])
def test_more_positions_than_the_model_has_are_refused(positions: int, tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"max_positions is {positions}; .* 1 … {CONTEXT}"):
        load_model(tmp_path, dtype=torch.float32, max_positions=positions)


def test_int4_weights_that_a_checkpoint_does_not_have_are_refused(tmp_path: Path) -> None:
    write_hf("llama2", tmp_path)
    with pytest.raises(UnsupportedModelError, match="stores no layer as Q4_0 or Q4_1, so weights=int4"):
        load_model(tmp_path, dtype=torch.bfloat16, max_positions=64, weights="int4")
    with pytest.raises(UnsupportedModelError, match="weights='int3' is not one of bf16, int4, auto"):
        load_model(tmp_path, dtype=torch.bfloat16, max_positions=64, weights="int3")


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="neither a Hugging Face model directory nor"):
        open_checkpoint(tmp_path / "nothing")


@pytest.fixture
def model(tmp_path: Path) -> LlamaModel:
    write_hf("llama2", tmp_path)
    return load_model(tmp_path, dtype=torch.float32, max_positions=64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ids": [1, 131]}, r"id 131 is out of range; it must be in 0 … 130"),
        ({"ids": [1, -1]}, "id -1 is out of range"),
        ({"positions": [63, 64]}, "position 64 is out of range"),
        ({"write_slots": [0, 32]}, "write slot 32 is out of range"),
        ({"ids": [1]}, "must be equal"),
    ],
)
def test_a_batch_that_is_out_of_range_is_refused_before_anything_is_written(
    changes: dict[str, list[int]], named: str, model: LlamaModel
) -> None:
    batch = build_batch([Chain([1], 0, [5, 6])], [], 16)
    cache = empty_cache(model, 32)
    with pytest.raises(ValueError, match=named):
        model.forward(replace(batch, **{key: torch.tensor(ids) for key, ids in changes.items()}), cache)
    assert not cache.keys.any()


def test_a_layer_that_does_not_exist_is_not_captured(model: LlamaModel) -> None:
    batch = build_batch([Chain([1], 0, [5, 6])], [], 16)
    with pytest.raises(ValueError, match="capture names layer 2; the model has layers 0 … 1"):
        model.forward(batch, empty_cache(model, 32), capture=captured_rows(model, batch, (2,)))


def test_a_cache_of_another_shape_is_refused(model: LlamaModel) -> None:
    batch = build_batch([Chain([1], 0, [5, 6])], [], 16)
    other = KvCache.allocate(replace(model.config, layers=3), 32, torch.float32)
    with pytest.raises(ValueError, match=r"this model needs torch.float32 \[2, 32, 6, 8\]"):
        model.forward(batch, other)
