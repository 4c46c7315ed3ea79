"""Trees grow where the head is sure, within the budget, and couple with the target's noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from common.sampling.params import SamplingParams
from common.sampling.sampler import sample
from common.sampling.tree import validate_tree
from services.draft.eagle.growth import Shape, grow
from services.draft.eagle.ranking import Predicted, Ranking

VOCAB, DRAFT = 40, 12
TARGET_IDS = torch.arange(DRAFT) * 3
GREEDY = SamplingParams()
BASE = 50


def predicted(logits: torch.Tensor, width: int) -> Predicted:
    return Predicted(logits, *logits.log_softmax(-1).topk(width, dim=-1))


class ScriptedForward:
    """Logits are a function of the path from the root alone: a node's output is the number of its path."""

    def __init__(self, sharpness: float, seed: int = 0) -> None:
        self.target_ids = TARGET_IDS
        self.sharpness = sharpness
        self.seed = seed
        self.paths: list[tuple[int, ...]] = [()]
        self.columns: list[tuple[int, ...]] = []
        self.positions: list[list[int]] = []

    def root(self) -> torch.Tensor:
        return torch.zeros(1, 1)

    def distribution(self, path: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) & 0xFFFFFF)
        return self.sharpness * torch.randn(DRAFT, generator=generator)

    def rank(self, outputs: torch.Tensor, width: int) -> Predicted:
        logits = torch.stack([self.distribution(self.paths[int(number)]) for number in outputs.flatten()])
        return predicted(logits, width)

    def step(self, outputs, ids, positions, plan, paths) -> torch.Tensor:
        self.positions.append(positions.tolist())
        made = []
        for number, token in zip(outputs.flatten().tolist(), ids.tolist(), strict=True):
            self.paths.append((*self.paths[int(number)], token))
            made.append(float(len(self.paths) - 1))
        self.columns += self.paths[-len(made) :]
        for path, seen in zip(self.paths[-len(made) :], paths[0].tolist(), strict=True):
            visible = [self.columns[number] for number in seen]
            assert visible == [path[: depth + 1] for depth in range(len(path))], "ancestors and itself"
        return torch.tensor(made).unsqueeze(1)


def grown(
    forward: ScriptedForward, nodes: int, shape: Shape, sampling: SamplingParams = GREEDY
) -> tuple[list[int], list[int]]:
    ranking = Ranking([sampling], [BASE], TARGET_IDS)
    ((tokens, parents),) = grow(forward, None, forward.root(), [BASE], ranking, [nodes], shape)
    return tokens, parents


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def score(forward: ScriptedForward, path: tuple[int, ...]) -> float:
    total = 0.0
    for at, token in enumerate(path):
        total += float(forward.distribution(path[:at]).log_softmax(-1)[token // 3])
    return total


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("nodes", [1, 3, 8, 13])
def test_the_most_probable_paths_that_were_seen_are_proposed_parents_first(
    sharpness: float, nodes: int
) -> None:
    for seed in range(5):
        forward = ScriptedForward(sharpness, seed)
        tokens, parents = grown(forward, nodes, Shape(width=4, depth=6))
        assert len(tokens) == nodes
        validate_tree([0, *tokens], [-1, *parents], VOCAB, nodes + 1)
        paths = paths_of(tokens, parents)
        assert len(set(paths)) == nodes
        worst = min(score(forward, path) for path in paths)
        for one in range(DRAFT):
            if (one * 3,) not in paths:
                others = [path for path in paths if len(path) == 1]
                assert len(others) == 4 or score(forward, (one * 3,)) <= worst + 1e-5


def test_a_sure_head_goes_deep_and_an_unsure_one_goes_wide() -> None:
    sure = paths_of(*grown(ScriptedForward(30.0), 8, Shape(width=4, depth=6)))
    unsure = paths_of(*grown(ScriptedForward(0.1), 8, Shape(width=4, depth=6)))
    assert max(map(len, sure)) == 6
    assert max(map(len, unsure)) <= 3
    assert sum(len(path) == 1 for path in unsure) == 4


def test_a_width_of_one_is_a_chain_of_the_likeliest_tokens() -> None:
    forward = ScriptedForward(2.0)
    tokens, parents = grown(forward, 7, Shape(width=1, depth=3))
    assert parents == list(range(7))
    for at, token in enumerate(tokens):
        assert token == int(TARGET_IDS[forward.distribution(tokens[:at]).argmax()])


def test_growth_stops_when_no_deeper_node_can_be_among_the_best() -> None:
    forward = ScriptedForward(0.01)
    grown(forward, 4, Shape(width=4, depth=6))
    assert len(forward.positions) == 1
    forward = ScriptedForward(30.0)
    grown(forward, 4, Shape(width=4, depth=6))
    assert len(forward.positions) == 3


def test_a_level_rotates_by_the_position_before_its_tokens() -> None:
    forward = ScriptedForward(30.0)
    grown(forward, 4, Shape(width=1))
    assert forward.positions == [[BASE - 1], [BASE], [BASE + 1]]


SAMPLINGS = [
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.3, seed=4, top_p=0.8),
    SamplingParams(temperature=1.0, seed=5, top_k=4),
    SamplingParams(temperature=1.0, seed=6, top_k=6, top_p=0.7, min_p=0.05),
]


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS])
def test_the_first_child_is_what_the_target_would_sample_from_the_same_logits(
    sampling: SamplingParams,
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(6, DRAFT, generator=generator)
    differs = 0
    for position in range(BASE, BASE + 40):
        ranking = Ranking([sampling], [position - 2], TARGET_IDS)
        scores, ids = ranking.children(predicted(logits, 3), 6, level=2)
        assert ids.dtype == torch.int64
        assert (scores <= 0).all()
        for node, row in enumerate(logits):
            whole = np.full(VOCAB, -np.inf, dtype=np.float32)
            whole[TARGET_IDS.numpy()] = row.numpy()
            assert int(ids[0, node, 0]) == sample(whole, sampling, position)
            differs += int(ids[0, node, 0]) != int(TARGET_IDS[row.argmax()])
    assert (differs > 0) == (sampling.temperature > 0)


def test_noise_touches_the_slots_that_sample_and_no_others() -> None:
    logits = torch.randn(4, DRAFT, generator=torch.Generator().manual_seed(2))
    mixed = Ranking([GREEDY, SAMPLINGS[0]], [BASE, BASE], TARGET_IDS).children(
        predicted(logits, 4), 2, level=0
    )
    greedy = Ranking([GREEDY], [BASE], TARGET_IDS).children(predicted(logits[:2], 4), 2, level=0)
    coupled = Ranking([SAMPLINGS[0]], [BASE], TARGET_IDS).children(predicted(logits[2:], 4), 2, level=0)
    for got, *due in zip(mixed, greedy, coupled, strict=True):
        assert torch.equal(got, torch.cat(due))


def test_tokens_that_the_target_filters_out_are_never_proposed() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, top_k=2)
    for seed in range(5):
        forward = ScriptedForward(1.0, seed)
        tokens, parents = grown(forward, 12, Shape(width=4, depth=4), sampling)
        for path in paths_of(tokens, parents):
            best = forward.distribution(path[:-1]).topk(2).indices
            assert path[-1] in TARGET_IDS[best]
