"""The tensor directory of a GGUF file, and its tensors as float32.

`gguf`'s own reader builds an array per metadata element, seconds for a vocabulary; its dequantisers do the
work.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from common.kernels.decoder_cpu import BLOCK_INPUTS
from common.kernels.packed import QuantisedBlocks
from common.model.checkpoint import CheckpointError
from common.model.gguf_metadata import MAGIC, GgufHeader

DEFAULT_ALIGNMENT = 32
PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
READABLE = PLAIN_TYPES + QUANTISED_TYPES
BLOCK_BYTES = {
    gguf.GGMLQuantizationType.Q4_0: 18,
    gguf.GGMLQuantizationType.Q4_1: 20,
    gguf.GGMLQuantizationType.Q8_0: 34,
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """shape: [out, in] as torch has it. offset: bytes from the start of the file."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    size: int


class GgufFile:
    """metadata: every key and value. tensors: by the file's own names. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise CheckpointError(f"{path} is empty, not a GGUF file") from None
        if self._data[:4] != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it begins with {self._data[:4]!r}")
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error

    def _read(self) -> None:
        header = GgufHeader(self._data)
        self.metadata = header.read(lambda key: not key.startswith("tokenizer.") or key.endswith("_id"))
        entries = []
        for _ in range(header.tensor_count):
            name = header.string()
            shape = tuple(header.scalar("<Q") for _ in range(header.scalar("<I")))[::-1]
            entries.append((name, shape, header.scalar("<I"), header.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-header.at // alignment) * alignment
        for name, shape, number, offset in entries:
            kind = gguf.GGMLQuantizationType(number)
            if kind.name not in READABLE:
                raise ValueError(
                    f"tensor {name} has type {kind.name}; these are supported: {', '.join(READABLE)}"
                )
            if name in self.tensors:
                raise ValueError(f"tensor {name} stands in it twice")
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ValueError(
                    f"tensor {name} of shape {list(shape)} does not divide into blocks of {block}"
                )
            size = prod(shape) // block * block_bytes
            if start + offset + size > len(self._data):
                raise ValueError(f"tensor {name} ends beyond the file's {len(self._data)} bytes")
            self.tensors[name] = GgufTensor(shape, kind, start + offset, size)

    def _raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Its bytes: uint8 [out, bytes of a row]."""
        entry = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, entry.size, entry.offset)
        return raw.reshape(*entry.shape[:-1], -1)

    def blocks(self, name: str) -> QuantisedBlocks | None:
        """The tensor as it is stored if that is Q4_0, Q4_1 or Q8_0 (layouts: llama.cpp, ggml-common.h)."""
        kind = self.tensors[name].type
        if kind not in BLOCK_BYTES:
            return None
        raw = self._raw(name)
        blocks = raw.reshape(raw.shape[0], -1, BLOCK_BYTES[kind])
        scales = _float16(blocks[..., :2])
        if kind == gguf.GGMLQuantizationType.Q8_0:
            return QuantisedBlocks(
                scales, None, torch.from_numpy(blocks[..., 2:].view(np.int8).copy()).flatten(1)
            )
        four_bits = blocks[..., -BLOCK_INPUTS // 2 :]
        quants = torch.from_numpy(np.concatenate([four_bits & 15, four_bits >> 4], axis=-1)).flatten(1)
        minima = _float16(blocks[..., 2:4]) if kind == gguf.GGMLQuantizationType.Q4_1 else scales * -8
        if not bool(minima.isfinite().all()):
            return None
        return QuantisedBlocks(scales, minima, quants)

    def float32(self, name: str) -> torch.Tensor:
        """The tensor dequantised, in memory of its own."""
        entry = self.tensors[name]
        raw = self._raw(name)
        if entry.type == gguf.GGMLQuantizationType.F32:
            values = raw.view(np.float32).copy()
        elif entry.type == gguf.GGMLQuantizationType.F16:
            values = raw.view(np.float16).astype(np.float32)
        else:
            values = gguf.quants.dequantize(raw, entry.type)
        return torch.from_numpy(values)


def _float16(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    """raw: uint8 [out, blocks, 2]. Returns float16 [out, blocks]."""
    return torch.from_numpy(raw.copy().view(np.float16).squeeze(-1))
