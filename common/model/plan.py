"""The numeric plan of a process: everything that decides the bits of a logit, and its fingerprint.

Two processes with equal fingerprints give the same tokens for the same request. Thread counts are left out:
no kernel in use has bits that depend on them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from common.model.llama import LlamaModel

SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NumericPlan:
    """weights, layers: names of the kernels of linear layers and of what lies between them. cpu: instruction
    set that torch dispatches to. checkpoint: `checkpoint_identity` of the weights."""

    weights: str
    layers: str
    torch_version: str
    cpu: str
    checkpoint: str

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def cpu_plan(checkpoint: Path, model: LlamaModel) -> NumericPlan:
    """The plan of a process that serves the checkpoint's model on a CPU."""
    return NumericPlan(
        weights=model.weights,
        layers=model.steps.numerics,
        torch_version=str(torch.__version__),
        cpu=torch.backends.cpu.get_cpu_capability(),
        checkpoint=checkpoint_identity(checkpoint),
    )


def checkpoint_identity(path: Path) -> str:
    """sha256 over name, size, first and last MiB of every weight and configuration file, in name order."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLED_BYTES))
            stream.seek(max(0, size - SAMPLED_BYTES))
            digest.update(stream.read(SAMPLED_BYTES))
    return digest.hexdigest()
