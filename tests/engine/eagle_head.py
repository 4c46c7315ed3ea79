"""A random EAGLE-3 head for the demo model, written as a checkpoint: it drafts, and never well."""

from __future__ import annotations

from pathlib import Path

import torch

from common.model.config import RopeConfig
from common.model.eagle3_checkpoint import Eagle3Weights, write_eagle3
from common.model.eagle3_config import Eagle3Config

HIDDEN, IDS, DRAFT_IDS = 576, 49152, 1024


def write_random_head(folder: Path) -> Path:
    """Small, and quick to write."""
    generator = torch.Generator().manual_seed(5)
    config = Eagle3Config(
        vocab_size=IDS,
        draft_vocab_size=DRAFT_IDS,
        target_hidden_size=HIDDEN,
        hidden_size=HIDDEN,
        intermediate_size=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        rms_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_context=8192,
    )

    def normal(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16)

    ids = torch.randperm(IDS, generator=generator)[:DRAFT_IDS].sort().values
    weights = Eagle3Weights(
        fc=normal(HIDDEN, 3 * HIDDEN),
        input_layernorm=ones(),
        hidden_norm=ones(),
        qkv=normal(8 * 64, 2 * HIDDEN),
        output=normal(HIDDEN, 4 * 64),
        post_attention_layernorm=ones(),
        gate_up=normal(2 * 256, HIDDEN),
        down=normal(HIDDEN, 256),
        norm=ones(),
        lm_head=normal(DRAFT_IDS, HIDDEN),
        d2t=ids - torch.arange(DRAFT_IDS),
    )
    write_eagle3(folder, config, weights)
    return folder
