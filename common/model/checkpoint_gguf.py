"""GGUF files of the architectures llama (Llama, Mistral, SmolLM2), qwen2 and qwen3."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from common.kernels.packed import QuantisedBlocks
from common.model.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, check_shapes, expected_shapes
from common.model.config_gguf import parse_gguf_config
from common.model.gguf_tensors import GgufFile

ROPE_FREQS = "rope_freqs.weight"
GLOBAL_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class GgufCheckpoint:
    """Checks names and shapes before any weight is read. Raises UnsupportedModelError and CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        shapes = {name: entry.shape for name, entry in self._file.tensors.items()}
        divisors = tuple(self._file.float32(ROPE_FREQS).flatten().tolist()) if ROPE_FREQS in shapes else ()
        self.config = parse_gguf_config(self._file.metadata, shapes, divisors)
        self._names = {canonical_name(name): name for name in shapes}
        found = {canonical: shapes[name] for canonical, name in self._names.items()}
        check_shapes(found, expected_shapes(self.config), source=str(path), ignored=[ROPE_FREQS])

    def tensor(self, name: str) -> torch.Tensor:
        return self._in_order(name, self._file.float32(self._names[name]))

    def blocks(self, name: str) -> QuantisedBlocks | None:
        stored = self._file.blocks(self._names[name])
        if stored is None:
            return None
        return QuantisedBlocks(
            self._in_order(name, stored.scales),
            None if stored.minima is None else self._in_order(name, stored.minima),
            self._in_order(name, stored.quants),
        )

    def _in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.config.family == "llama" and ".self_attn." in name:
            if ".q_proj." in name:
                return half_rotation_rows(tensor, self.config.heads)
            if ".k_proj." in name:
                return half_rotation_rows(tensor, self.config.kv_heads)
        return tensor


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one is its own."""

    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = BLOCK.fullmatch(name)
    if match and match[2] in BLOCK_NAMES:
        return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"
    return name


def half_rotation_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes the order in which llama.cpp stores query and key rows ([heads × head_dim, …]) of the llama
    architecture: there the two dimensions of a rotation are neighbours, here they are head_dim / 2 apart."""

    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
