"""Tiny random checkpoints of every family, written by transformers and by gguf, for the engine's tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

CONTEXT = 256
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "vocab_size": 131,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changes: object) -> transformers.PreTrainedConfig:
    values = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.LlamaConfig(**{**SHAPES, **values, **changes})


def mistral(**changes: object) -> transformers.PreTrainedConfig:
    values = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
    return transformers.MistralConfig(**{**SHAPES, **values, "sliding_window": None, **changes})


def qwen2(**changes: object) -> transformers.PreTrainedConfig:
    values = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    return transformers.Qwen2Config(**{**SHAPES, **values, "use_sliding_window": False, **changes})


def qwen3(**changes: object) -> transformers.PreTrainedConfig:
    values = {"hidden_size": 36, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    return transformers.Qwen3Config(**{**SHAPES, **values, "use_sliding_window": False, **changes})


FAMILIES = {
    "llama2": lambda: llama(num_key_value_heads=6, hidden_size=96),
    "llama3": lambda: llama(rope_parameters=LLAMA3_ROPE, num_hidden_layers=3),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, hidden_size=54),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2-tied": lambda: qwen2(tie_word_embeddings=True),
    "qwen3": qwen3,
    "qwen3-biases": lambda: qwen3(attention_bias=True),
    "smollm2": lambda: llama(
        tie_word_embeddings=True, num_attention_heads=9, num_key_value_heads=3, head_dim=16, hidden_size=63
    ),
}


def random_model(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """Every parameter is random, biases and norms too, so that a forgotten one shows."""

    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.3 * noise if norm else 0.2 * noise)
    return model


def write_hf(family: str, directory: Path, *, shard_bytes: int | None = None) -> transformers.PreTrainedModel:
    model = random_model(family)
    model.save_pretrained(directory, max_shard_size=shard_bytes or "1GB")
    return model


@dataclass(frozen=True)
class GgufLayout:
    """architecture: in the file. permuted: query and key rows are stored pairwise, as llama.cpp does for
    llama."""

    architecture: str
    permuted: bool


GGUF_LAYOUTS = {"llama": GgufLayout("llama", True), "mistral": GgufLayout("llama", True)} | {
    name: GgufLayout(name, False) for name in ("qwen2", "qwen3")
}
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{BLOCK_NAMES[module]}.{kind}"


def pairwise_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is dimension i, row 2i + 1 is dimension i + head_dim / 2."""
    rows = weight.shape[0] // heads
    order = [
        h * rows + i + half * (rows // 2) for h in range(heads) for i in range(rows // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_freqs: list[float] | None = None,
) -> None:
    """Matrices whose rows divide into the type's blocks are stored as `quantised`, and model gets the values
    that come back; the rest is float32."""

    config = model.config
    layout = GGUF_LAYOUTS[config.model_type]
    writer = gguf.GGUFWriter(path, layout.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    block = gguf.GGML_QUANT_SIZES[quantised][0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            kind = (
                quantised
                if values.ndim == 2 and values.shape[1] % block == 0
                else gguf.GGMLQuantizationType.F32
            )
            parameter.copy_(
                torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))
            )
            if layout.permuted and ".q_proj." in name:
                values = pairwise_rows(values, config.num_attention_heads)
            if layout.permuted and ".k_proj." in name:
                values = pairwise_rows(values, config.num_key_value_heads)
            stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
