"""KV memory over plain and over given memory."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES

from common.attention.kv_cache import KvCache, kv_bytes_per_position
from common.model.config import ModelConfig
from common.model.config_hf import parse_hf_config


@pytest.fixture
def config() -> ModelConfig:
    raw = FAMILIES["llama3"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return parse_hf_config(raw, eos_ids=())


def test_bytes_per_position_are_those_of_keys_and_values(config: ModelConfig) -> None:
    assert kv_bytes_per_position(config, torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    assert kv_bytes_per_position(config, torch.float32) == 2 * kv_bytes_per_position(config, torch.bfloat16)


def test_given_memory_is_used_in_place(config: ModelConfig) -> None:
    buffer = torch.zeros(32 * kv_bytes_per_position(config, torch.bfloat16), dtype=torch.uint8)
    cache = KvCache.over(buffer, config, 32, torch.bfloat16)
    assert cache.keys.shape == cache.values.shape == (3, 32, 2, 8)
    cache.write(
        1, torch.tensor([4, 9]), torch.ones(2, 2, 8).bfloat16(), torch.full((2, 2, 8), 2.0).bfloat16()
    )
    again = KvCache.over(buffer, config, 32, torch.bfloat16)
    assert again.keys[1, [4, 9]].eq(1).all()
    assert again.values[1, [4, 9]].eq(2).all()
    assert int((buffer != 0).sum()) == 2 * 2 * 16 * 2 - 32  # bfloat16 2.0 is 0x4000: one byte of two


@pytest.mark.parametrize("change", [-1, 1])
def test_memory_of_another_size_is_refused(change: int, config: ModelConfig) -> None:
    size = 32 * kv_bytes_per_position(config, torch.bfloat16)
    with pytest.raises(ValueError, match=rf"32 positions need uint8 \[{size}\]"):
        KvCache.over(torch.zeros(size + change, dtype=torch.uint8), config, 32, torch.bfloat16)


@pytest.mark.parametrize(
    ("source", "target"), [([3, 5, 6], [2, 3, 5]), ([2, 3, 4], [3, 4, 5]), ([8, 1], [1, 8])]
)
def test_ranges_that_overlap_are_moved_as_if_read_first(
    source: list[int], target: list[int], config: ModelConfig
) -> None:
    cache = KvCache.allocate(config, 10, torch.float32)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.move(torch.tensor(source), torch.tensor(target))
    keys[:, target], values[:, target] = keys[:, source].clone(), values[:, source].clone()
    assert torch.equal(cache.keys, keys)
    assert torch.equal(cache.values, values)
