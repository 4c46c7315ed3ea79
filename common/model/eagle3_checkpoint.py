"""EAGLE-3 heads on disk: `config.json` beside `model.safetensors`, as they are published.

Tensors of the decoder layer stand under `midlayer.` or `layers.0.`. `embed_tokens.weight` is there only where
the head does not use the target's. `d2t` holds offsets: the target's id of draft id i is i + d2t[i].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.model.checkpoint import CheckpointError, check_shapes
from common.model.config import UnsupportedModelError
from common.model.eagle3_config import Eagle3Config, eagle3_config_json, parse_eagle3_config

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
IGNORED = ("t2d", "mask_hidden")
"""t2d repeats what d2t says; mask_hidden is for drafting in parallel."""


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """One head, linear weights [out, in].

    input_norm: [aux_size], for norm_before_fc. fc_norms: [target_hidden] each, for fc_norm. qkv: queries,
    keys and values in one weight, of [embedding, feature] side by side. gate_up: gate first. d2t: int64
    [draft_vocab], offsets. embed_tokens: [vocab, hidden], None where the target's is used.
    """

    fc: torch.Tensor
    input_layernorm: torch.Tensor
    hidden_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    post_attention_layernorm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    d2t: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    fc_norms: tuple[torch.Tensor, ...] = ()
    embed_tokens: torch.Tensor | None = None

    @property
    def target_ids(self) -> torch.Tensor:
        """The target's id of every draft id: int64 [draft_vocab]."""

        return torch.arange(self.d2t.shape[0]) + self.d2t


def read_eagle3(directory: Path) -> tuple[Eagle3Config, Eagle3Weights]:
    """Raises UnsupportedModelError and CheckpointError, naming what is wrong and where, before weights are
    read wherever the header can tell."""

    config = parse_eagle3_config(_read_json(directory / CONFIG_FILE))
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            stored = {_canonical(name): name for name in file.keys()}  # noqa: SIM118 - not a mapping
            shapes = {name: tuple(file.get_slice(at).get_shape()) for name, at in stored.items()}
            present = "embed_tokens.weight" in shapes
            check_shapes(shapes, expected_eagle3_shapes(config, present), source=str(path), ignored=IGNORED)
            tensors = {name: file.get_tensor(at) for name, at in stored.items() if name not in IGNORED}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    for name, tensor in tensors.items():
        _check_type(path, name, tensor)
    return config, _weights(config, tensors, path)


def write_eagle3(directory: Path, config: Eagle3Config, weights: Eagle3Weights) -> None:
    """Each file is complete or absent. Raises UnsupportedModelError for what has no published spelling."""

    raw = eagle3_config_json(config, str(weights.fc.dtype).removeprefix("torch."))
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / f".{WEIGHTS_FILE}.tmp"
    save_file(_named(config, weights), scratch, {"format": "pt"})
    scratch.chmod(0o644)
    os.replace(scratch, directory / WEIGHTS_FILE)
    scratch = directory / f".{CONFIG_FILE}.tmp"
    scratch.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, directory / CONFIG_FILE)


def expected_eagle3_shapes(config: Eagle3Config, embedding: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a head by its published name. embedding: it brings its own."""

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.aux_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (hidden,)
    if config.draft_vocab_size != config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if config.attention_bias:
        for name, size in (("q", query), ("k", key), ("v", key)):
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = (size,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.aux_size,)
    if config.fc_norm:
        for index in range(config.aux_count):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    if embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    return shapes


def _weights(config: Eagle3Config, tensors: Mapping[str, torch.Tensor], path: Path) -> Eagle3Weights:
    def stacked(names: tuple[str, ...], part: str) -> torch.Tensor:
        return torch.cat([tensors[f"midlayer.{name}_proj.{part}"] for name in names])

    projections = ("self_attn.q", "self_attn.k", "self_attn.v")
    whole = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    weights = Eagle3Weights(
        fc=tensors["fc.weight"],
        input_layernorm=tensors["midlayer.input_layernorm.weight"],
        hidden_norm=tensors["midlayer.hidden_norm.weight"],
        qkv=stacked(projections, "weight"),
        output=tensors["midlayer.self_attn.o_proj.weight"],
        post_attention_layernorm=tensors["midlayer.post_attention_layernorm.weight"],
        gate_up=stacked(("mlp.gate", "mlp.up"), "weight"),
        down=tensors["midlayer.mlp.down_proj.weight"],
        norm=tensors["norm.weight"],
        lm_head=tensors["lm_head.weight"],
        d2t=tensors.get("d2t", whole).long(),
        qkv_bias=stacked(projections, "bias") if config.attention_bias else None,
        input_norm=tensors.get("input_norm.weight"),
        fc_norms=tuple(tensors[f"fc_norm.{at}.weight"] for at in range(config.aux_count * config.fc_norm)),
        embed_tokens=tensors.get("embed_tokens.weight"),
    )
    _check_target_ids(config, weights.target_ids, path)
    return weights


def _named(config: Eagle3Config, weights: Eagle3Weights) -> dict[str, torch.Tensor]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    tensors = {
        "fc.weight": weights.fc,
        "midlayer.input_layernorm.weight": weights.input_layernorm,
        "midlayer.hidden_norm.weight": weights.hidden_norm,
        "midlayer.post_attention_layernorm.weight": weights.post_attention_layernorm,
        "midlayer.self_attn.o_proj.weight": weights.output,
        "midlayer.mlp.down_proj.weight": weights.down,
        "norm.weight": weights.norm,
        "lm_head.weight": weights.lm_head,
    }
    for name, part in zip("qkv", torch.split(weights.qkv, [query, key, key]), strict=True):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = part
    if weights.qkv_bias is not None:
        for name, part in zip("qkv", torch.split(weights.qkv_bias, [query, key, key]), strict=True):
            tensors[f"midlayer.self_attn.{name}_proj.bias"] = part
    for name, part in zip(("gate", "up"), weights.gate_up.chunk(2), strict=True):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = part
    if weights.input_norm is not None:
        tensors["input_norm.weight"] = weights.input_norm
    for index, norm in enumerate(weights.fc_norms):
        tensors[f"fc_norm.{index}.weight"] = norm
    if weights.embed_tokens is not None:
        tensors["embed_tokens.weight"] = weights.embed_tokens
    if config.draft_vocab_size != config.vocab_size:
        tensors["d2t"] = weights.d2t
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(
            0, weights.target_ids, True
        )
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _canonical(name: str) -> str:
    for prefix in LAYER_PREFIXES:
        if name.startswith(prefix):
            return "midlayer." + name.removeprefix(prefix)
    return name


def _check_type(path: Path, name: str, tensor: torch.Tensor) -> None:
    allowed: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    if name == "d2t":
        allowed = (torch.int64, torch.int32)
    if tensor.dtype not in allowed:
        names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
        raise CheckpointError(f"{path}: {name} is stored as {tensor.dtype}; {names} are supported")


def _check_target_ids(config: Eagle3Config, ids: torch.Tensor, path: Path) -> None:
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointError(
            f"{path}: d2t leads to target ids {int(ids.min())} … {int(ids.max())}; the vocabulary has"
            f" {config.vocab_size}"
        )
    if torch.unique(ids).numel() != ids.numel():
        raise CheckpointError(f"{path}: d2t names a target id twice")


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path} does not exist; an EAGLE-3 head has one") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path} holds {type(raw).__name__}, not an object")
    return raw
