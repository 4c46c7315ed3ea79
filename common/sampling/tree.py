"""Token trees: their shape, and the walk that verifies one by sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def walk(
    tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int], int]
) -> tuple[list[int], int]:
    """The accepted path, as node indices from the root's child on, and the bonus token that ends it.

    choose(node): the token sampled after that node. If a child of the node holds it the walk goes there (of
    two such children to the lower index), else it is the bonus token. No draft probability enters, so the
    tokens are those of sampling one at a time, whatever the tree.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        children.setdefault((parents[node], tokens[node]), node)
    path: list[int] = []
    node = 0
    while True:
        token = choose(node)
        child = children.get((node, token))
        if child is None:
            return path, token
        path.append(child)
        node = child


def validate_tree(tokens: Sequence[int], parents: Sequence[int], vocab_size: int, max_nodes: int) -> None:
    """Raises ValueError naming the fault unless: 1 … max_nodes nodes, as many parents, parents[0] is −1,
    0 ≤ parents[j] < j, and every token is in the vocabulary."""
    if len(tokens) != len(parents):
        raise ValueError(f"tree has {len(tokens)} tokens and {len(parents)} parents")
    if not 1 <= len(tokens) <= max_nodes:
        raise ValueError(f"tree has {len(tokens)} nodes, expected 1 to {max_nodes}")
    if parents[0] != -1:
        raise ValueError(f"tree root has parent {parents[0]}, expected -1")
    for node in range(1, len(parents)):
        if not 0 <= parents[node] < node:
            raise ValueError(f"tree node {node} has parent {parents[node]}, expected 0 to {node - 1}")
    for node, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise ValueError(f"tree node {node} has token {token}, the vocabulary has {vocab_size}")
