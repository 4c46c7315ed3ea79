"""What a checkpoint of the family must hold, under its canonical (Hugging Face) names, whatever its
format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from common.kernels.packed import QuantisedBlocks
from common.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class CheckpointError(ValueError):
    """The files do not hold the weights that their configuration promises; the message names tensor and
    file."""


class Checkpoint(Protocol):
    """Weights by canonical name, read one at a time so that two copies are never alive."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of `expected_shapes`, in the checkpoint's own floating-point type (float32 where it was
        quantised), query and key rows in the half-rotation layout. Raises CheckpointError."""
        ...

    def blocks(self, name: str) -> QuantisedBlocks | None:
        """The same tensor as it is stored, where that is in blocks of 4 or 8 bits that the kernels compute
        with."""
        ...


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads: canonical name → shape; linear weights are [out, in]."""

    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key, hidden, config.qkv_bias),
        "self_attn.v_proj": (key, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = layer_prefix(layer)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_shapes(
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    source: str,
    ignored: Collection[str] = (),
) -> None:
    """Raises CheckpointError for a missing, an unexpected or a wrongly shaped tensor. ignored: names that
    may be there and are not read."""

    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{source}: {_some(missing)} missing; the download is incomplete or the config is wrong"
        )
    extra = sorted(found.keys() - expected.keys() - set(ignored))
    if extra:
        raise CheckpointError(
            f"{source}: {_some(extra)} not part of this architecture as its config describes it"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(found[name])}, its config needs {list(shape)}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
