"""The tree walk: whatever the tree, the tokens are those of sampling one at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling.tree import validate_tree, walk


def chooser(answers: dict[int, int]):
    return lambda node: answers[node]


def test_a_root_alone_gives_the_bonus_token() -> None:
    assert walk([5], [-1], chooser({0: 9})) == ([], 9)


def test_the_walk_follows_matching_children_and_stops_at_the_first_miss() -> None:
    tokens, parents = [1, 10, 20, 30, 40], [-1, 0, 0, 2, 3]
    assert walk(tokens, parents, chooser({0: 20, 2: 30, 3: 41})) == ([2, 3], 41)
    assert walk(tokens, parents, chooser({0: 99})) == ([], 99)
    assert walk(tokens, parents, chooser({0: 20, 2: 30, 3: 40, 4: 7})) == ([2, 3, 4], 7)


def test_of_children_with_the_same_token_the_lower_index_is_taken() -> None:
    tokens, parents = [1, 10, 10, 5, 6], [-1, 0, 0, 1, 2]
    assert walk(tokens, parents, chooser({0: 10, 1: 6})) == ([1], 6)


def test_a_token_elsewhere_in_the_tree_is_not_a_child() -> None:
    assert walk([1, 10, 20], [-1, 0, 1], chooser({0: 20})) == ([], 20)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    return draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), parents


@settings(max_examples=300, deadline=None, derandomize=True)
@given(trees(), st.integers(0, 1000))
def test_walked_tokens_are_those_of_sampling_without_a_tree(
    tree: tuple[list[int], list[int]], seed: int
) -> None:
    tokens, parents = tree
    validate_tree(tokens, parents, vocab_size=4, max_nodes=24)

    def after(prefix: tuple[int, ...]) -> int:
        return hash((seed, prefix)) % 4

    def prefix_of(node: int) -> tuple[int, ...]:
        return () if node == 0 else (*prefix_of(parents[node]), tokens[node])

    path, bonus = walk(tokens, parents, lambda node: after(prefix_of(node)))
    said = [tokens[node] for node in path] + [bonus]
    plain: tuple[int, ...] = ()
    for _ in said:
        plain = (*plain, after(plain))
    assert tuple(said) == plain
    last = path[-1] if path else 0
    assert all(not (parents[j] == last and tokens[j] == bonus) for j in range(1, len(tokens)))


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ([1, 2], [-1], "2 tokens and 1 parents"),
        ([], [], "0 nodes, expected 1 to 4"),
        ([1] * 5, [-1, 0, 1, 2, 3], "5 nodes, expected 1 to 4"),
        ([1, 2], [0, 0], "root has parent 0"),
        ([1, 2], [-1, 1], "node 1 has parent 1, expected 0 to 0"),
        ([1, 2], [-1, -1], "node 1 has parent -1"),
        ([1, 2, 3], [-1, 2, 0], "node 1 has parent 2"),
        ([1, 100], [-1, 0], "node 1 has token 100, the vocabulary has 100"),
        ([-1], [-1], "node 0 has token -1"),
    ],
)
def test_a_malformed_tree_is_refused_by_its_fault(tokens: list[int], parents: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate_tree(tokens, parents, vocab_size=100, max_nodes=4)
