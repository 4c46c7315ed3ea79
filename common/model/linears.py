"""How a model's linear layers are made from a checkpoint: plain torch, or packed for the compiled kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from common.kernels.decoder_cpu import DecoderKernels
from common.kernels.huge_pages import HugePages
from common.kernels.packed import PackedMatrix, QuantisedBlocks
from common.model.checkpoint import Checkpoint, layer_prefix
from common.model.linear import Linear, linear

LAYER_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Linears(Protocol):
    """numerics: names format and kernels, for the numeric plan."""

    numerics: str

    def fused(self, checkpoint: Checkpoint, names: list[str], bias: bool) -> Linear:
        """One layer whose outputs are those of the named ones, side by side."""
        ...

    def gate_up(self, checkpoint: Checkpoint, names: list[str], bias: bool) -> Linear:
        """Like fused, for the two projections that `GatedMlp` multiplies."""
        ...

    def head(self, checkpoint: Checkpoint, name: str) -> Linear:
        """The layer named, whose outputs are logits."""
        ...


class PlainLinears:
    """dtype: bfloat16, or float32 for parity tests."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.numerics = f"{str(dtype).removeprefix('torch.')}-onednn-packed"
        self._dtype = dtype

    def fused(self, checkpoint: Checkpoint, names: list[str], bias: bool) -> Linear:
        return linear(*_read(checkpoint, names, bias, self._dtype), self._dtype)

    gate_up = fused

    def head(self, checkpoint: Checkpoint, name: str) -> Linear:
        return self.fused(checkpoint, [name.removesuffix(".weight")], False)


class PackedLinears:
    """For the compiled kernels. keep_blocks: what the checkpoint stores in blocks of 4 or 8 bits is computed
    as it stands, the rest in bfloat16; else everything is bfloat16."""

    def __init__(self, kernels: DecoderKernels, keep_blocks: bool) -> None:
        self.numerics = ("int4" if keep_blocks else "bf16") + "-packed"
        self._kernels = kernels
        self._memory = HugePages()
        self._keep_blocks = keep_blocks

    def fused(self, checkpoint: Checkpoint, names: list[str], bias: bool) -> PackedMatrix:
        return PackedMatrix(self._kernels, self._memory, *self._weight(checkpoint, names, bias))

    def gate_up(self, checkpoint: Checkpoint, names: list[str], bias: bool) -> PackedMatrix:
        weight, offsets = self._weight(checkpoint, names, bias)
        return PackedMatrix(self._kernels, self._memory, weight, offsets, paired=True)

    def head(self, checkpoint: Checkpoint, name: str) -> PackedMatrix:
        weight, _ = self._weight(checkpoint, [name.removesuffix(".weight")], False)
        return PackedMatrix(self._kernels, self._memory, weight, wide=True)

    def _weight(
        self, checkpoint: Checkpoint, names: list[str], bias: bool
    ) -> tuple[torch.Tensor | QuantisedBlocks, torch.Tensor | None]:
        blocks = _blocks(checkpoint, names) if self._keep_blocks else None
        if blocks is None:
            return _read(checkpoint, names, bias, torch.bfloat16)
        return blocks, _stacked(checkpoint, names, "bias") if bias else None


def has_int4(checkpoint: Checkpoint) -> bool:
    """Whether a linear layer of the decoder is stored in 4 bits."""

    for layer in range(checkpoint.config.layers):
        for name in LAYER_LINEARS:
            blocks = checkpoint.blocks(f"{layer_prefix(layer)}{name}.weight")
            if blocks is not None and blocks.minima is not None:
                return True
    return False


def _blocks(checkpoint: Checkpoint, names: list[str]) -> QuantisedBlocks | None:
    """None unless all of them are stored in blocks of one kind."""

    parts = [checkpoint.blocks(f"{name}.weight") for name in names]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({part.minima is None for part in found}) > 1:
        return None
    return QuantisedBlocks.stacked(found)


def _read(
    checkpoint: Checkpoint, names: list[str], bias: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.cat([checkpoint.tensor(f"{name}.weight").to(dtype) for name in names])
    return weight, _stacked(checkpoint, names, "bias").to(dtype) if bias else None


def _stacked(checkpoint: Checkpoint, names: list[str], part: str) -> torch.Tensor:
    return torch.cat([checkpoint.tensor(f"{name}.{part}") for name in names])
