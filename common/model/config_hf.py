"""`ModelConfig` from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.model.config import ModelConfig, RopeConfig, UnsupportedModelError, llama3_divisors

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What transformers assumes for a Mistral config without the key.
MISTRAL_DEFAULT_WINDOW = 4096


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises UnsupportedModelError naming what is missing or not supported."""

    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    eos = [raw.get("eos_token_id")]
    if generation.is_file():
        eos.append(_read_json(generation).get("eos_token_id"))
    return parse_hf_config(raw, eos_ids=_flat_ids(eos))


def parse_hf_config(raw: Mapping[str, Any], *, eos_ids: tuple[int, ...]) -> ModelConfig:
    """raw: the parsed `config.json`. Raises UnsupportedModelError."""

    family = _family(raw)
    _refuse_sliding_window(family, raw)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; only 'silu' is")
    heads = positive(raw, "num_attention_heads")
    hidden_size = positive(raw, "hidden_size")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            raise UnsupportedModelError(
                f"hidden_size {hidden_size} does not divide into {heads} attention heads"
            )
        head_dim = hidden_size // heads
    attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        layers=positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(raw, head_dim),
        max_context=positive(raw, "max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        eos_ids=eos_ids,
        bos_id=raw.get("bos_token_id"),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{path} does not exist; a Hugging Face model directory has one"
        ) from None
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path} holds {type(raw).__name__}, not an object")
    return raw


def _family(raw: Mapping[str, Any]) -> str:
    architectures = raw.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    named = ", ".join(architectures) or f"model_type {raw.get('model_type')!r} without architectures"
    raise UnsupportedModelError(f"{named} is not supported; these are: {', '.join(FAMILIES)}")


def positive(raw: Mapping[str, Any], key: str) -> int:
    """Raises UnsupportedModelError for anything but a positive integer."""

    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} is {value!r}; a positive integer is needed")
    return value


def _refuse_sliding_window(family: str, raw: Mapping[str, Any]) -> None:
    if family.startswith("qwen"):
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    else:
        window = raw.get("sliding_window", MISTRAL_DEFAULT_WINDOW) if family == "mistral" else None
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise UnsupportedModelError(
            "config.json: layer_types asks for sliding_attention, which is not supported"
        )
    max_context = positive(raw, "max_position_embeddings")
    if window is not None and window < max_context:
        raise UnsupportedModelError(
            f"config.json: sliding_window {window} is below max_position_embeddings {max_context};"
            " sliding-window"
            f" attention is not supported (set max_position_embeddings to {window} to serve that much"
            " context)"
        )


def parse_rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Raises UnsupportedModelError for scalings other than llama3's."""

    # transformers 5 writes rope_parameters; older ones rope_theta beside rope_scaling.
    parameters: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {partial} is not supported; only 1.0 is"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        try:
            divisors = llama3_divisors(
                theta,
                head_dim,
                factor=float(parameters["factor"]),
                low_freq=float(parameters["low_freq_factor"]),
                high_freq=float(parameters["high_freq_factor"]),
                original_context=int(parameters["original_max_position_embeddings"]),
            )
        except KeyError as error:
            raise UnsupportedModelError(f"config.json: llama3 RoPE scaling without {error.args[0]}") from None
        return RopeConfig(theta, divisors)
    raise UnsupportedModelError(
        f"config.json: RoPE type {kind!r} is not supported; 'default' and 'llama3' are"
    )


def _flat_ids(values: list[Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(ids))
