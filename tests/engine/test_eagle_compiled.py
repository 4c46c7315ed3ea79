"""The compiled head against its twin in plain torch, for every form that heads are published in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle3_heads import TARGET_HIDDEN, VARIANTS, VOCAB, random_weights

from common.attention.kv_cache import KvCache
from common.kernels.build import KernelsUnavailable
from common.kernels.decoder_cpu import BLOCK_INPUTS
from common.kernels.packed import QuantisedBlocks
from common.model.eagle3 import Eagle3Head
from common.model.eagle3_compiled import CompiledHead
from common.sampling.params import SamplingParams
from services.draft.eagle.attention import DecodeAttention, ExtendAttention, ExtendPlan
from services.draft.eagle.compiled import CompiledForward, DecodeKeys, ExtendKeys
from services.draft.eagle.entries import Places
from services.draft.eagle.forward import EagleForward
from services.draft.eagle.growth import Shape, grow
from services.draft.eagle.ranking import Ranking

PLACES, POSITIONS = 80, 64
MATRICES = ("fc", "qkv", "output", "gate_up", "down", "lm_head")
KNOWN = Places(torch.tensor([40, 3, 12, 55, 7, 9, 61, 17, 22]), torch.tensor([6, 3]))
EXTENDED = ExtendPlan(
    write_slots=torch.tensor([7, 9, 17, 22]),
    positions=torch.tensor([3, 4, 0, 2]),
    last=torch.tensor([1, 3]),
    places=KNOWN,
)
LEVELS = [
    torch.tensor([[[0], [1]], [[0], [1]]]),
    torch.tensor([[[0, 2], [0, 3]], [[1, 2], [0, 3]]]),
    torch.tensor([[[0, 3, 4], [0, 2, 5]], [[1, 2, 4], [0, 3, 5]]]),
]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """As the compiled head holds it; a weight that has no such layout stays as it is."""
    if weight.shape[1] % BLOCK_INPUTS:
        return weight
    blocks = QuantisedBlocks.rounded(weight.bfloat16())
    scales = blocks.scales.float().repeat_interleave(BLOCK_INPUTS, dim=1)
    return blocks.quants.float() * scales


def forwards(name: str) -> tuple[list[Any], list[KvCache]]:
    config = VARIANTS[name]
    weights = random_weights(config, embedding=name == "plain")
    embedding = random(VOCAB, config.hidden_size, seed=1)
    caches = [
        KvCache(*random(2, 1, PLACES, config.kv_heads, config.head_dim, seed=2).unbind(0)) for _ in range(2)
    ]
    compiled = CompiledHead(config, weights, embedding=embedding, max_positions=POSITIONS)
    held = replace(weights, **{part: in_eight_bits(getattr(weights, part)) for part in MATRICES})
    plain = Eagle3Head(config, held, dtype=torch.bfloat16, embedding=embedding, max_positions=POSITIONS)
    both = [
        CompiledForward(compiled, caches[0], ExtendKeys(), DecodeKeys()),
        EagleForward(plain, caches[1], ExtendAttention(), DecodeAttention()),
    ]
    return both, caches


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert (got.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()


@pytest.mark.parametrize("name", VARIANTS)
def test_extend_and_every_level_of_trees_are_those_of_the_twin(name: str) -> None:
    both, caches = forwards(name)
    features = [one.fuse(random(4, 3 * TARGET_HIDDEN, seed=3)) for one in both]
    close(*features)
    outputs = [one.extend(features[1], torch.tensor([5, 6, 7, 8]), EXTENDED) for one in both]
    close(*outputs)
    written = torch.zeros(PLACES, dtype=torch.bool)
    written[EXTENDED.write_slots] = True
    close(*(cache.keys[0, written] for cache in caches))
    for cache in caches:
        before = random(2, 1, PLACES, *cache.keys.shape[2:], seed=2)
        assert torch.equal(cache.keys[0, ~written], before[0, 0, ~written])
        assert torch.equal(cache.values[0, ~written], before[1, 0, ~written])
    plans = [one.plan_steps(KNOWN, 6) for one in both]
    above = outputs[1].repeat_interleave(2, dim=0)
    for level, paths in enumerate(LEVELS):
        ids, positions = torch.tensor([1, 2, 3, 4]) + level, torch.tensor([5, 5, 3, 3]) + level
        made = [one.step(above, ids, positions, plan, paths) for one, plan in zip(both, plans, strict=True)]
        close(*made)
        above = made[1]
    ranked, wanted = (one.rank(above, 3) for one in both)
    close(ranked.logits, wanted.logits)
    close(ranked.scores, wanted.scores)
    best, drafted = ranked.logits.log_softmax(-1).topk(3, dim=-1)
    torch.testing.assert_close(ranked.scores, best)
    assert torch.equal(ranked.logits.gather(1, ranked.ids), ranked.logits.gather(1, drafted))


@pytest.mark.parametrize("name", ["plain", "norm-output", "scaled-logits"])
@pytest.mark.parametrize("shape", [Shape(1), Shape(2, 3), Shape(4, 6)])
@pytest.mark.parametrize("nodes", [(1, 1), (2, 5), (8, 3), (9, 9)])
def test_greedy_trees_are_those_that_grow_level_by_level(
    name: str, shape: Shape, nodes: tuple[int, int]
) -> None:
    (compiled, _), _ = forwards(name)
    outputs = random(2, VARIANTS[name].hidden_size, seed=5)
    bases = [7, 4]
    plan = compiled.plan_steps(KNOWN, shape.expanded(max(nodes)))
    ranking = Ranking([SamplingParams()] * 2, bases, compiled.target_ids)
    wanted = grow(compiled, plan, outputs, bases, ranking, nodes, shape)
    assert compiled.grow(outputs, bases, nodes, KNOWN, shape) == wanted
    assert [len(tokens) for tokens, _ in wanted] == list(nodes)


def test_an_embedding_of_another_width_is_refused() -> None:
    config = replace(VARIANTS["plain"], hidden_size=32)
    with pytest.raises(ValueError, match=r"\[40, 24\], the head needs \[40, 32\]"):
        CompiledHead(config, random_weights(config), embedding=torch.zeros(VOCAB, 24), max_positions=8)


@pytest.mark.parametrize("shape", [Shape(1), Shape(4, 6)])
def test_a_head_whose_numbers_overflow_proposes_nothing(shape: Shape) -> None:
    (compiled, _), _ = forwards("plain")
    outputs = torch.full((2, VARIANTS["plain"].hidden_size), float("nan")).bfloat16()
    assert compiled.grow(outputs, [7, 4], [3, 8], KNOWN, shape) == [([], []), ([], [])]


def test_sizes_without_a_layout_are_left_to_the_twin() -> None:
    config = replace(VARIANTS["plain"], hidden_size=15)
    with pytest.raises(KernelsUnavailable, match="inputs must be even"):
        CompiledHead(config, random_weights(config), embedding=torch.zeros(VOCAB, 15), max_positions=8)
