"""A checkpoint becomes a model: weights are read one at a time, fused and packed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from common.attention.torch_backend import TorchAttention
from common.graphs.steps import CapturedSteps
from common.kernels.build import KernelsUnavailable
from common.kernels.decoder_cpu import MAX_HEAD_DIM, DecoderKernels, decoder_kernels
from common.model.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, Checkpoint, layer_prefix
from common.model.checkpoint_gguf import GgufCheckpoint
from common.model.checkpoint_hf import HfCheckpoint
from common.model.config import ModelConfig, UnsupportedModelError
from common.model.layers import DecoderLayer, GatedMlp, HeadNorms, RmsNorm, SelfAttention
from common.model.linear import Linear, linear, require_packed_bf16
from common.model.llama import LlamaModel
from common.model.rope import RopeTable
from common.model.steps import EagerSteps, Steps

log = logging.getLogger("model")

Progress = Callable[[int, int], None]
"""Called with layers loaded and layers in all."""


def open_checkpoint(path: Path) -> Checkpoint:
    """path: a Hugging Face directory or a GGUF file. Raises UnsupportedModelError and CheckpointError."""

    if path.is_dir():
        return HfCheckpoint(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise UnsupportedModelError(f"{path} is neither a Hugging Face model directory nor a .gguf file")


def load_model(
    path: Path, *, dtype: torch.dtype, max_positions: int, progress: Progress | None = None
) -> LlamaModel:
    """path: a Hugging Face directory or a GGUF file. dtype: bfloat16, or float32 for parity tests.

    max_positions: longest sequence to be served, at most the checkpoint's context. Raises
    UnsupportedModelError, CheckpointError, and RuntimeError where this CPU cannot serve bfloat16.
    """

    kernels = None
    if dtype == torch.bfloat16:
        require_packed_bf16()
        kernels = serving_kernels()
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if not 0 < max_positions <= config.max_context:
        raise UnsupportedModelError(
            f"max_positions is {max_positions}; {path.name} was made for 1 … {config.max_context} positions"
        )
    return build_model(
        checkpoint, dtype=dtype, max_positions=max_positions, kernels=kernels, progress=progress
    )


def serving_kernels() -> DecoderKernels | None:
    """None, and a warning, where they cannot be had."""

    try:
        return decoder_kernels()
    except KernelsUnavailable as error:
        log.warning("no compiled kernels, so every step takes longer and has other bits: %s", error)
        return None


@torch.inference_mode()
def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    max_positions: int,
    kernels: DecoderKernels | None = None,
    progress: Progress | None = None,
) -> LlamaModel:
    """kernels: for bfloat16 alone; without them the layers run eagerly, with other bits."""

    config = checkpoint.config
    embedding = checkpoint.tensor(EMBEDDING).to(dtype)
    head = embedding if config.tied_embeddings else checkpoint.tensor(LM_HEAD)
    layers = []
    for layer in range(config.layers):
        layers.append(_decoder_layer(checkpoint, layer, dtype))
        if progress is not None:
            progress(layer + 1, config.layers)
    return LlamaModel(
        config,
        dtype=dtype,
        max_positions=max_positions,
        embedding=embedding,
        steps=_steps(config, embedding, tuple(layers), max_positions, kernels),
        final_norm=_norm(checkpoint, FINAL_NORM, dtype),
        lm_head=linear(head, None, dtype),
    )


def _steps(
    config: ModelConfig,
    embedding: torch.Tensor,
    layers: tuple[DecoderLayer, ...],
    max_positions: int,
    kernels: DecoderKernels | None,
) -> Steps:
    rope = RopeTable(config.rope, config.head_dim, max_positions)
    if kernels is not None and config.head_dim <= MAX_HEAD_DIM:
        return CapturedSteps(kernels, config, embedding, layers, rope)
    attention = TorchAttention(config.heads, config.kv_heads, config.head_dim)
    return EagerSteps(config, embedding, layers, rope, attention)


def _decoder_layer(checkpoint: Checkpoint, layer: int, dtype: torch.dtype) -> DecoderLayer:
    config, prefix = checkpoint.config, layer_prefix(layer)
    attention = prefix + "self_attn."
    projections = [f"{attention}{name}_proj" for name in "qkv"]
    return DecoderLayer(
        attention_norm=_norm(checkpoint, f"{prefix}input_layernorm.weight", dtype),
        attention=SelfAttention(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qkv=_fused(checkpoint, projections, config.qkv_bias, dtype),
            output=_fused(checkpoint, [f"{attention}o_proj"], config.output_bias, dtype),
            head_norms=_head_norms(checkpoint, attention, config, dtype),
        ),
        mlp_norm=_norm(checkpoint, f"{prefix}post_attention_layernorm.weight", dtype),
        mlp=GatedMlp(
            gate_up=_fused(
                checkpoint, [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], config.mlp_bias, dtype
            ),
            down=_fused(checkpoint, [f"{prefix}mlp.down_proj"], config.mlp_bias, dtype),
        ),
    )


def _fused(checkpoint: Checkpoint, names: list[str], bias: bool, dtype: torch.dtype) -> Linear:
    """One linear layer whose outputs are those of the named ones, side by side."""

    def stacked(part: str) -> torch.Tensor:
        return torch.cat([checkpoint.tensor(f"{name}.{part}").to(dtype) for name in names])

    return linear(stacked("weight"), stacked("bias") if bias else None, dtype)


def _head_norms(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, dtype: torch.dtype
) -> HeadNorms | None:
    if not config.qk_norm:
        return None
    return HeadNorms(
        query=_norm(checkpoint, f"{prefix}q_norm.weight", dtype),
        key=_norm(checkpoint, f"{prefix}k_norm.weight", dtype),
    )


def _norm(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> RmsNorm:
    return RmsNorm(checkpoint.tensor(name).to(dtype), checkpoint.config.rms_eps)
