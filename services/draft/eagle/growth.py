"""Token trees that follow the head's confidence (EAGLE-2: Li et al., 2024): each level expands its most
probable nodes, and of all that were seen the most probable are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.draft.eagle.attention import DecodePlan
from services.draft.eagle.forward import EagleForward
from services.draft.eagle.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Shape:
    """width: nodes that a level expands, and children that each gets; 1 is a chain. depth: most levels of a
    tree that is wider; a chain has as many as nodes are asked for."""

    width: int = 4
    depth: int = 6

    def levels(self, most_nodes: int) -> int:
        return most_nodes if self.width == 1 else min(self.depth, most_nodes)


@dataclass(slots=True)
class _Pool:
    """Every node that was seen, a level behind the other. scores: float32 [slots, nodes], log-probability of
    the path. ids: int64. parents: int64, indices into the pool; −1 is the root."""

    scores: torch.Tensor
    ids: torch.Tensor
    parents: torch.Tensor

    def add(self, scores: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor) -> None:
        self.scores = torch.cat([self.scores, scores], dim=1)
        self.ids = torch.cat([self.ids, ids], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)


def grow(
    forward: EagleForward,
    plan: DecodePlan,
    outputs: torch.Tensor,
    bases: torch.Tensor,
    ranking: Ranking,
    nodes: Sequence[int],
    shape: Shape,
) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of every slot's tree without its root; parents count from the root, which is 0.

    outputs: [slots, hidden], of the bonus tokens' entries. bases: int64 [slots], committed lengths: the first
    level's tokens stand at these positions. nodes: how many each slot may have.
    """
    slots, width = outputs.shape[0], shape.width
    levels = shape.levels(max(nodes))
    scores, ids = ranking.children(forward.logits(outputs), 1, width, level=0)
    scores, ids = scores[:, 0], ids[:, 0]  # [slots, width]
    pool = _Pool(scores, ids, torch.full_like(ids, -1))
    behind = outputs.repeat_interleave(width, dim=0)  # outputs of the frontier's parents
    frontier = torch.arange(width).expand(slots, width)  # indices into the pool
    ancestors = torch.empty(slots, width, 0, dtype=torch.bool)
    itself = torch.eye(width, dtype=torch.bool).expand(slots, width, width)
    most = torch.tensor(nodes)
    for level in range(1, levels):
        if _is_settled(pool, scores, most):
            break
        ancestors = torch.cat([ancestors, itself], dim=-1)
        # The entry of a token at position p rotates by p − 1.
        positions = (bases + (level - 2)).repeat_interleave(width)
        made = forward.step(behind, ids.flatten(), positions, plan, ancestors)
        more, found = ranking.children(forward.logits(made), width, width, level=level)
        more = (more + scores.unsqueeze(-1)).flatten(1)  # [slots, width²]
        found = found.flatten(1)
        first = pool.ids.shape[1]
        pool.add(more, found, frontier.repeat_interleave(width, dim=1))
        scores, best = more.topk(width, dim=1)
        ids = found.gather(1, best)
        parents = best // width
        frontier = first + best
        behind = made.view(slots, width, -1).gather(1, parents.unsqueeze(-1).expand(-1, -1, made.shape[1]))
        behind = behind.flatten(0, 1)
        ancestors = ancestors.gather(1, parents.unsqueeze(-1).expand(-1, -1, ancestors.shape[2]))
    return _best(pool, nodes)


def _is_settled(pool: _Pool, frontier_scores: torch.Tensor, most: torch.Tensor) -> bool:
    """No descendant of the frontier can be among any slot's best: paths only become less probable."""
    seen = pool.scores.shape[1]
    if seen < int(most.max()):
        return False
    ranked = pool.scores.sort(dim=1, descending=True).values
    last = ranked.gather(1, (most - 1).clamp(min=0).unsqueeze(1))
    return bool((frontier_scores[:, :1] <= last).all())


def _best(pool: _Pool, nodes: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    order = pool.scores.argsort(dim=1, descending=True, stable=True)
    trees = []
    for ranked, scores, ids, parents, most in zip(
        order.tolist(), pool.scores.tolist(), pool.ids.tolist(), pool.parents.tolist(), nodes, strict=True
    ):
        # A parent is at least as probable as its child and was seen before: it is chosen if the child is.
        chosen = sorted(node for node in ranked[:most] if scores[node] > float("-inf"))
        place = {node: 1 + index for index, node in enumerate(chosen)}
        place[-1] = 0
        trees.append(([ids[node] for node in chosen], [place[parents[node]] for node in chosen]))
    return trees
