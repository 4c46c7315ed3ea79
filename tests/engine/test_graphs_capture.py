"""Which layers a captured step hands out."""

from __future__ import annotations

from pathlib import Path

import torch
from sequences import Chain, run
from tiny_models import write_hf

from common.attention.kv_cache import KvCache
from common.model.load import load_model


def test_a_layer_may_be_captured_twice(tmp_path: Path) -> None:
    """As an EAGLE-3 head of a target with six layers asks for: 2, 3 and 3."""

    write_hf("llama2", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, max_positions=256)
    cache = KvCache.allocate(model.config, 64, torch.bfloat16)
    captured = run(model, cache, [Chain([1], 0, [5, 6, 7])], capture=(1, 0, 1)).captured
    assert captured is not None
    first, second, third = captured.chunk(3, dim=-1)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
