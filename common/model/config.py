"""What a decoder of the Llama family is made of, whatever file it was read from."""

import math
from dataclasses import dataclass


class UnsupportedModelError(ValueError):
    """The checkpoint asks for something that this engine does not compute; the message names it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding in the half-rotation layout: dimension i turns with dimension i + head_dim / 2.

    theta: base of the inverse frequencies. divisors: one per frequency (head_dim / 2), by which it is divided
    (long-context scaling); empty means none.
    """

    theta: float
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one model.

    family: llama | mistral | qwen2 | qwen3, for messages only; what differs is in the fields.
    max_context: positions that the checkpoint was made for. qk_norm: RMSNorm over each query and key head
    before the rotation. eos_ids, bos_id: as the checkpoint names them; bos_id is None where it has none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_context: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "max_context",
        ):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"{self.heads} heads do not divide into {self.kv_heads} key/value heads"
            )
        if self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"head_dim is {self.head_dim}; multiples of 8 up to {MAX_HEAD_DIM} are supported"
            )
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise UnsupportedModelError(
                f"{len(self.rope.divisors)} RoPE divisors for head_dim {self.head_dim};"
                f" {self.head_dim // 2} are needed"
            )

    @property
    def queries_per_kv_head(self) -> int:
        return self.heads // self.kv_heads


MAX_HEAD_DIM = 256
"""Up to here the bf16 batched product over 64 keys was found to give a row the same bits in any batch."""


def llama3_divisors(
    theta: float, head_dim: int, *, factor: float, low_freq: float, high_freq: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of Llama 3's RoPE scaling: wavelengths above original_context / low_freq are stretched by
    factor, those below original_context / high_freq are kept, and between them the change is smooth."""

    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = (original_context / wavelength - low_freq) / (high_freq - low_freq)
        kept = min(max(smooth, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)
