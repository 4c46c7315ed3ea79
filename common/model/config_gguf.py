"""`ModelConfig` from GGUF metadata (key names: ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.model.config import ModelConfig, RopeConfig, UnsupportedModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def parse_gguf_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: tuple[float, ...],
) -> ModelConfig:
    """metadata: key → value. shapes: the file's tensors by their GGUF names. rope_divisors: contents of
    `rope_freqs.weight`, empty where the file has none. Raises UnsupportedModelError."""

    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {family!r} is not supported; these are: {', '.join(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        value = metadata.get(f"{family}.{key}")
        if value is None:
            raise UnsupportedModelError(f"GGUF metadata has no {family}.{key}")
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"GGUF metadata: {family}.{key} differs by layer, which is not supported"
            )
        return value

    if metadata.get(f"{family}.expert_count"):
        raise UnsupportedModelError(
            f"GGUF metadata: {family}.expert_count asks for experts, which are not supported"
        )
    heads = int(need("attention.head_count"))
    hidden_size = int(need("embedding_length"))
    head_dim = int(metadata.get(f"{family}.attention.key_length") or hidden_size // heads)
    _refuse_other_rope(family, metadata, head_dim)
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError("GGUF file has no tensor token_embd.weight")
    eos = [metadata[key] for key in EOS_KEYS if metadata.get(key) is not None]
    return ModelConfig(
        family=family,
        vocab_size=embedding[0],
        hidden_size=hidden_size,
        intermediate_size=int(need("feed_forward_length")),
        layers=int(need("block_count")),
        heads=heads,
        kv_heads=int(metadata.get(f"{family}.attention.head_count_kv") or heads),
        head_dim=head_dim,
        rms_eps=float(need("attention.layer_norm_rms_epsilon")),
        rope=RopeConfig(float(metadata.get(f"{family}.rope.freq_base", 10000.0)), rope_divisors),
        max_context=int(need("context_length")),
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _refuse_other_rope(family: str, metadata: Mapping[str, Any], head_dim: int) -> None:
    scaling = metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(
            f"GGUF metadata: {family}.rope.scaling.type {scaling!r} is not supported; 'none' is (Llama"
            " 3's scaling"
            " comes as the tensor rope_freqs.weight)"
        )
    rotated = int(metadata.get(f"{family}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise UnsupportedModelError(
            f"GGUF metadata: {family}.rope.dimension_count is {rotated}, of a head of {head_dim}; partial"
            " rotation is"
            " not supported"
        )
    window, context = (
        metadata.get(f"{family}.attention.sliding_window"),
        metadata.get(f"{family}.context_length"),
    )
    if window and context and window < context:
        raise UnsupportedModelError(
            f"GGUF metadata: {family}.attention.sliding_window {window} is below the context length"
            f" {context};"
            " sliding-window attention is not supported"
        )
