"""Token trees that follow the head's confidence (EAGLE-2: Li et al., 2024): each level expands its most
probable nodes, and of all that were seen the most probable are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.draft.eagle.forward import HeadForward, Plan
from services.draft.eagle.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Shape:
    """width: nodes that a level expands, and children that each gets; 1 is a chain. depth: most levels of a
    tree that is wider; a chain has as many as nodes are asked for."""

    width: int = 4
    depth: int = 6

    def levels(self, most_nodes: int) -> int:
        return most_nodes if self.width == 1 else min(self.depth, most_nodes)

    def at(self, level: int, most_nodes: int) -> int:
        """Nodes of a level, counted from 1, that are worth expanding, and children that those of the level
        before are worth: each of the best that stands on it has its ancestors among the best."""
        return min(self.width, most_nodes - level + 1)

    def expanded(self, most_nodes: int) -> int:
        """Nodes of a tree that are expanded at most."""
        return sum(self.at(level + 1, most_nodes) for level in range(1, self.levels(most_nodes)))


class _Tree:
    """Every node that was seen of one slot's tree, a level behind the other; −1 is the root. A level's most
    probable nodes are its frontier and are expanded next; expanded nodes have numbers, in this order. behind:
    the frontier's parents, as places in the frontier before."""

    def __init__(self, scores: Sequence[float], ids: Sequence[int], width: int) -> None:
        """width: of the first frontier."""
        self.scores = list(scores)
        self.ids = list(ids)
        self.parents = [-1] * len(self.ids)
        self.frontier = list(range(width))
        self.behind = [0] * width
        self._paths: list[tuple[int, ...]] = [()] * width
        self._expanded = 0

    def paths(self) -> list[tuple[int, ...]]:
        """The numbers of every frontier node's ancestors, and its own."""
        return [(*path, self._expanded + at) for at, path in enumerate(self._paths)]

    def expand(self, scores: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], width: int) -> None:
        """Children of every frontier node, with log-probabilities. width: of the next frontier."""
        paths, first, children = self.paths(), len(self.ids), len(ids[0])
        for node, child_scores, child_ids in zip(self.frontier, scores, ids, strict=True):
            so_far = self.scores[node]
            self.scores.extend(so_far + score for score in child_scores)
            self.ids.extend(child_ids)
            self.parents.extend([node] * len(child_ids))
        self._expanded += len(paths)
        # A stable sort: of equally probable nodes the first stays the first.
        self.frontier = sorted(range(first, len(self.ids)), key=lambda node: -self.scores[node])[:width]
        self.behind = [(node - first) // children for node in self.frontier]
        self._paths = [paths[parent] for parent in self.behind]

    def is_settled(self, most: int) -> bool:
        """No descendant of the frontier can be among the best: paths only become less probable."""
        if len(self.scores) < most:
            return False
        return self.scores[self.frontier[0]] <= sorted(self.scores, reverse=True)[max(0, most - 1)]

    def best(self, most: int) -> tuple[list[int], list[int]]:
        """Tokens, and parents counted from the root, which is 0."""
        ranked = sorted(range(len(self.ids)), key=lambda node: -self.scores[node])[:most]
        # A parent is at least as probable as its child and was seen before: it is chosen if the child is.
        chosen = sorted(node for node in ranked if self.scores[node] > float("-inf"))
        place = {node: 1 + index for index, node in enumerate(chosen)}
        place[-1] = 0
        return [self.ids[node] for node in chosen], [place[self.parents[node]] for node in chosen]


def grow(
    forward: HeadForward[Plan],
    plan: Plan,
    outputs: torch.Tensor,
    bases: Sequence[int],
    ranking: Ranking,
    nodes: Sequence[int],
    shape: Shape,
) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of every slot's tree without its root; parents count from the root, which is 0.

    outputs: [slots, hidden], of the bonus tokens' entries. bases: committed lengths: the first level's tokens
    stand at these positions. nodes: how many each slot may have.
    """
    most = max(nodes)
    levels = shape.levels(most)
    scores, ids = ranking.children(forward.rank(outputs, shape.at(1, most)), 1, level=0)
    width = shape.at(2, most)
    trees = [_Tree(*firsts, width) for firsts in zip(scores[:, 0].tolist(), ids[:, 0].tolist(), strict=True)]
    before = 1  # nodes of a slot that were expanded on the level before
    for level in range(1, levels):
        if all(tree.is_settled(most_here) for tree, most_here in zip(trees, nodes, strict=True)):
            break
        rows = [slot * before + behind for slot, tree in enumerate(trees) for behind in tree.behind]
        tokens = [tree.ids[node] for tree in trees for node in tree.frontier]
        # The entry of a token at position p rotates by p − 1.
        positions = [base + level - 2 for base in bases for _ in range(width)]
        outputs = forward.step(
            outputs.index_select(0, torch.tensor(rows)),
            torch.tensor(tokens),
            torch.tensor(positions),
            plan,
            torch.tensor([tree.paths() for tree in trees]),
        )
        before = width
        scores, ids = ranking.children(forward.rank(outputs, width), width, level=level)
        width = shape.at(level + 2, most)
        for tree, more, found in zip(trees, scores.tolist(), ids.tolist(), strict=True):
            tree.expand(more, found, width)
    return [tree.best(most_here) for tree, most_here in zip(trees, nodes, strict=True)]
