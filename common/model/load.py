"""A checkpoint becomes a model: weights are read one at a time, fused and packed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from common.attention.torch_backend import TorchAttention
from common.graphs.steps import CapturedSteps
from common.kernels.build import KernelsUnavailable
from common.kernels.decoder_cpu import MAX_HEAD_DIM, MAX_LAYERS, DecoderKernels, decoder_kernels
from common.model.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, Checkpoint, layer_prefix
from common.model.checkpoint_gguf import GgufCheckpoint
from common.model.checkpoint_hf import HfCheckpoint
from common.model.config import ModelConfig, UnsupportedModelError
from common.model.layers import DecoderLayer, GatedMlp, HeadNorms, RmsNorm, SelfAttention
from common.model.linear import require_packed_bf16
from common.model.linears import Linears, PackedLinears, PlainLinears, has_int4
from common.model.llama import LlamaModel
from common.model.rope import RopeTable
from common.model.steps import EagerSteps, Steps

log = logging.getLogger("model")

WEIGHTS = ("bf16", "int4", "auto")

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
    path: Path,
    *,
    dtype: torch.dtype,
    max_positions: int,
    weights: str = "bf16",
    progress: Progress | None = None,
) -> LlamaModel:
    """path: a Hugging Face directory or a GGUF file. dtype: of activations; bfloat16, or float32 for parity
    tests.

    max_positions: longest sequence to be served, at most the checkpoint's context. weights: bf16, int4 (what
    is stored in blocks of 4 or 8 bits is computed as it stands), or auto, which is int4 where the checkpoint
    has blocks of 4 bits. Raises UnsupportedModelError, CheckpointError, and RuntimeError where this CPU
    cannot serve bfloat16.
    """

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    if not 0 < max_positions <= config.max_context:
        raise UnsupportedModelError(
            f"max_positions is {max_positions}; {path.name} was made for 1 … {config.max_context} positions"
        )
    kernels = None
    if dtype == torch.bfloat16:
        require_packed_bf16()
        kernels = _serving_kernels(config)
    keep_blocks = _keep_blocks(checkpoint, path, weights, kernels)
    return build_model(
        checkpoint,
        dtype=dtype,
        max_positions=max_positions,
        kernels=kernels,
        keep_blocks=keep_blocks,
        progress=progress,
    )


def _serving_kernels(config: ModelConfig) -> DecoderKernels | None:
    """None, and a warning, where they cannot be had."""

    try:
        return _kernels_for(config)
    except KernelsUnavailable as error:
        log.warning("no compiled kernels, so every step takes longer and has other bits: %s", error)
        return None


def _kernels_for(config: ModelConfig) -> DecoderKernels:
    """Raises KernelsUnavailable."""

    odd = [
        size
        for size in (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
        if size % 2
    ]
    if config.head_dim > MAX_HEAD_DIM or config.layers > MAX_LAYERS or odd:
        raise KernelsUnavailable(
            f"they serve even sizes, heads up to {MAX_HEAD_DIM} wide and {MAX_LAYERS} layers; this model has"
            f" heads of {config.head_dim}, {config.layers} layers and sizes {config.hidden_size} and"
            f" {config.intermediate_size}"
        )
    return decoder_kernels()


def _keep_blocks(checkpoint: Checkpoint, path: Path, weights: str, kernels: DecoderKernels | None) -> bool:
    """Raises UnsupportedModelError when int4 was asked for and cannot be had."""

    if weights not in WEIGHTS:
        raise UnsupportedModelError(f"weights={weights!r} is not one of {', '.join(WEIGHTS)}")
    if weights == "bf16" or (weights == "auto" and kernels is None):
        return False
    found = has_int4(checkpoint)
    if weights == "int4" and not found:
        raise UnsupportedModelError(
            f"{path.name} stores no layer as Q4_0 or Q4_1, so weights=int4 cannot be had; use bf16 or auto"
        )
    if weights == "int4" and kernels is None:
        raise UnsupportedModelError(
            "weights=int4 needs the compiled kernels, which this machine lacks; use bf16"
        )
    return found


@torch.inference_mode()
def build_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    max_positions: int,
    kernels: DecoderKernels | None = None,
    keep_blocks: bool = False,
    progress: Progress | None = None,
) -> LlamaModel:
    """kernels: for bfloat16 alone; without them the layers run eagerly, with other bits. keep_blocks: with
    kernels, compute what is stored in blocks of 4 or 8 bits as it stands."""

    config = checkpoint.config
    linears: Linears = PlainLinears(dtype) if kernels is None else PackedLinears(kernels, keep_blocks)
    embedding = checkpoint.tensor(EMBEDDING).to(dtype)
    layers = []
    for layer in range(config.layers):
        layers.append(_decoder_layer(checkpoint, layer, dtype, linears))
        if progress is not None:
            progress(layer + 1, config.layers)
    rope = RopeTable(config.rope, config.head_dim, max_positions)
    return LlamaModel(
        config,
        dtype=dtype,
        max_positions=max_positions,
        embedding=embedding,
        steps=_steps(config, embedding, tuple(layers), rope, kernels),
        final_norm=_norm(checkpoint, FINAL_NORM, dtype),
        lm_head=linears.head(checkpoint, EMBEDDING if config.tied_embeddings else LM_HEAD),
        weights=linears.numerics,
    )


def _steps(
    config: ModelConfig,
    embedding: torch.Tensor,
    layers: tuple[DecoderLayer, ...],
    rope: RopeTable,
    kernels: DecoderKernels | None,
) -> Steps:
    if kernels is not None:
        return CapturedSteps(kernels, config, embedding, layers, rope)
    attention = TorchAttention(config.heads, config.kv_heads, config.head_dim)
    return EagerSteps(config, embedding, layers, rope, attention)


def _decoder_layer(checkpoint: Checkpoint, layer: int, dtype: torch.dtype, linears: Linears) -> DecoderLayer:
    config, prefix = checkpoint.config, layer_prefix(layer)
    attention = prefix + "self_attn."
    projections = [f"{attention}{name}_proj" for name in "qkv"]
    return DecoderLayer(
        attention_norm=_norm(checkpoint, f"{prefix}input_layernorm.weight", dtype),
        attention=SelfAttention(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qkv=linears.fused(checkpoint, projections, config.qkv_bias),
            output=linears.fused(checkpoint, [f"{attention}o_proj"], config.output_bias),
            head_norms=_head_norms(checkpoint, attention, config, dtype),
        ),
        mlp_norm=_norm(checkpoint, f"{prefix}post_attention_layernorm.weight", dtype),
        mlp=GatedMlp(
            gate_up=linears.gate_up(
                checkpoint, [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], config.mlp_bias
            ),
            down=linears.fused(checkpoint, [f"{prefix}mlp.down_proj"], config.mlp_bias),
        ),
    )


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
