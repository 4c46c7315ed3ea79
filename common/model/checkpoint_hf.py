"""Hugging Face directories: `config.json` beside safetensors, one file or sharded by an index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from common.model.checkpoint import LM_HEAD, CheckpointError, check_shapes, expected_shapes
from common.model.config_hf import read_hf_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HfCheckpoint:
    """Opens every shard's header and checks names and shapes before any weight is read.

    Raises UnsupportedModelError and CheckpointError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_hf_config(directory)
        shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path in _weight_files(directory):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in self._files:
                        raise CheckpointError(f"{name} stands in {self._files[name].name} and in {path.name}")
                    self._files[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        # Old files carry RoPE's frequencies, and some write the head although it is tied.
        ignored = [name for name in shapes if name.endswith("rotary_emb.inv_freq")]
        if self.config.tied_embeddings:
            ignored.append(LM_HEAD)
        check_shapes(shapes, expected_shapes(self.config), source=str(directory), ignored=ignored)

    def tensor(self, name: str) -> torch.Tensor:
        with _open(self._files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise CheckpointError(
                f"{self._files[name]}: {name} is stored as {tensor.dtype}; float32, float16 and bfloat16"
                " are supported"
            )
        return tensor

    def blocks(self, name: str) -> None:
        """Nothing: this format has no blocks."""


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{directory} has neither {SINGLE} nor {INDEX}; only safetensors weights are read"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    paths = []
    for name in names:
        path = directory / str(name)
        if path.parent != directory:
            raise CheckpointError(f"{index}: shard {name!r} lies outside the directory")
        if not path.is_file():
            raise CheckpointError(f"{path} is named by {INDEX} and missing; the download is incomplete")
        paths.append(path)
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
