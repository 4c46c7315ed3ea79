"""What the target wrote, on disk: ids, which of them are an answer, and what the target computed at each.

A shard is one safetensors file, complete or absent, read through a memory map.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "paceline-draft-data-1"


class DataError(ValueError):
    """Training data that cannot be used; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Example:
    """One turn and its answer. ids: int64 [n]. answer: bool [n], true where the target wrote the token as an
    answer.

    top: int64 [n], argmax of the target's logits at the position, −1 where they were not computed. states:
    bfloat16 [n, (aux + 1) × hidden], auxiliary states and the final hidden state side by side; the last row
    may be empty (zeros), because nothing was computed behind the last token. turn, kind: the user's text and
    how it came about.
    """

    ids: torch.Tensor
    answer: torch.Tensor
    top: torch.Tensor
    states: torch.Tensor
    turn: str
    kind: str

    @property
    def answer_tokens(self) -> int:
        return int(self.answer.sum())


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(folder: Path, sequences: Sequence[Example], *, model: str, layers: tuple[int, ...]) -> Path:
    """The next shard of the folder. model: identity of the target's checkpoint. layers: those whose entering
    residual stream the auxiliary states are."""

    paths = shard_paths(folder)
    number = int(paths[-1].stem.removeprefix("shard-")) + 1 if paths else 0
    path = folder / f"shard-{number:05d}.safetensors"
    lengths = torch.tensor([one.ids.shape[0] for one in sequences])
    tensors = {
        "lengths": lengths,
        "ids": torch.cat([one.ids for one in sequences]).to(torch.int32),
        "answer": torch.cat([one.answer for one in sequences]).to(torch.uint8),
        "top": torch.cat([one.top for one in sequences]).to(torch.int32),
        "states": torch.cat([one.states for one in sequences]),
    }
    metadata = {
        "format": FORMAT,
        "model": model,
        "layers": json.dumps(layers),
        "turns": json.dumps([one.turn for one in sequences]),
        "kinds": json.dumps([one.kind for one in sequences]),
    }
    scratch = path.with_suffix(".tmp")
    save_file(tensors, scratch, metadata)
    os.replace(scratch, path)
    return path


def read_shard(path: Path, *, model: str, layers: tuple[int, ...]) -> Iterator[Example]:
    """States stay on disk until they are touched. Raises DataError for another model or other layers."""

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, model, layers)
            tensors = {name: file.get_tensor(name) for name in ("lengths", "ids", "answer", "top", "states")}
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a readable shard: {error}; remove it") from error
    turns, kinds = json.loads(metadata["turns"]), json.loads(metadata["kinds"])
    first = 0
    for length, turn, kind in zip(tensors["lengths"].tolist(), turns, kinds, strict=True):
        rows = slice(first, first + length)
        yield Example(
            tensors["ids"][rows].long(),
            tensors["answer"][rows].bool(),
            tensors["top"][rows].long(),
            tensors["states"][rows],
            turn,
            kind,
        )
        first += length


def _check(path: Path, metadata: dict[str, str], model: str, layers: tuple[int, ...]) -> None:
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} has format {metadata.get('format')!r}, not {FORMAT!r}; remove it")
    if metadata["model"] != model:
        raise DataError(f"{path} was written by another model; choose another data directory")
    if json.loads(metadata["layers"]) != list(layers):
        raise DataError(
            f"{path} holds states of layers {metadata['layers']}, {list(layers)} are wanted; choose another"
            " data directory"
        )
