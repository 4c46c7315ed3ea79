"""Logits, KV and captured rows at a position are the same bits however the position was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sequences import PAGE, Chain, Tree, chain_tree, empty_cache, pages_for, run
from tiny_models import FAMILIES, write_hf

from common.attention.kv_cache import KvCache
from common.attention.segments import physical_slots
from common.model.llama import LlamaModel
from common.model.load import build_model, load_model, open_checkpoint

CAPTURE = (0, 1)
# Pages of the sequence under test lie apart and out of order; the cache around them holds NaN.
NEIGHBOUR_PAGES = 200


@dataclass(frozen=True)
class Rows:
    """What one pass gave for positions start, start + 1, … (logits, captured) and 0 … end − 1 (KV)."""

    start: int
    logits: torch.Tensor
    captured: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Subject:
    """A model, a sequence, and the rows of one prefill of it."""

    model: LlamaModel
    ids: list[int]
    rows: Rows

    def pages(self) -> list[int]:
        return scattered_pages(len(self.ids) + 40)

    def cache(self) -> KvCache:
        positions = (max(self.pages()) + 1 + NEIGHBOUR_PAGES) * PAGE
        return empty_cache(self.model, positions, fill=torch.nan)

    def free_pages(self, positions: int) -> list[int]:
        return pages_for(positions, max(self.pages()) + 1)


def scattered_pages(positions: int, seed: int = 3) -> list[int]:
    count = len(pages_for(positions))
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))
    return (order[:count] + 1).tolist()


def random_ids(length: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def kept(cache: KvCache, pages: list[int], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = physical_slots(torch.tensor(pages), torch.arange(end), PAGE)
    return cache.keys[:, slots], cache.values[:, slots]


def prefill(subject_model: LlamaModel, cache: KvCache, pages: list[int], ids: list[int], chunk: int) -> Rows:
    outputs = [
        run(subject_model, cache, [Chain(pages, at, ids[at : at + chunk])], capture=CAPTURE)
        for at in range(0, len(ids), chunk)
    ]
    return Rows(
        0,
        torch.cat([output.logits for output in outputs]),
        torch.cat([output.captured for output in outputs]),
        *kept(cache, pages, len(ids)),
    )


def make_subject(model: LlamaModel, length: int) -> Subject:
    ids = random_ids(length, model.config.vocab_size, 1)
    pages = pages_for(length)
    cache = empty_cache(model, (len(pages) + 1) * PAGE)
    return Subject(model, ids, prefill(model, cache, pages, ids, length))


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo(demo_gguf: Path) -> Subject:
    return make_subject(load_model(demo_gguf, dtype=torch.bfloat16, max_positions=1024), 290)


@pytest.fixture(scope="module")
def demo_int4(demo_gguf: Path) -> Subject:
    model = load_model(demo_gguf, dtype=torch.bfloat16, max_positions=1024, weights="int4")
    return make_subject(model, 290)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp(request.param)
    write_hf(request.param, directory)
    return make_subject(load_model(directory, dtype=torch.bfloat16, max_positions=256), 150)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """What a machine without compiled kernels runs."""
    directory = tmp_path_factory.mktemp("eager")
    write_hf("llama3", directory)
    checkpoint = open_checkpoint(directory)
    return make_subject(build_model(checkpoint, dtype=torch.bfloat16, max_positions=256), 150)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_same_rows(found: Rows, expected: Rows) -> None:
    end = found.start + found.logits.shape[0]
    assert not found.logits.isnan().any()
    assert same_bits(found.captured, expected.captured[found.start : end])
    assert same_bits(found.keys, expected.keys[:, : found.keys.shape[1]])
    assert same_bits(found.values, expected.values[:, : found.values.shape[1]])
    assert same_bits(found.logits, expected.logits[found.start : end])


# One function per way to compute the subject's rows.


def in_chunks(size: int) -> Callable[[Subject], Rows]:
    def way(subject: Subject) -> Rows:
        return prefill(subject.model, subject.cache(), subject.pages(), subject.ids, size)

    return way


def token_by_token(subject: Subject) -> Rows:
    """The last 24 positions as decode rows, one forward each."""
    return _by_steps(subject, steps=[1] * 24)


def verify_chains(subject: Subject) -> Rows:
    """The last positions as verified chains of growing length."""
    return _by_steps(subject, steps=[2, 3, 5, 8, 16, 33])


def _by_steps(subject: Subject, steps: list[int]) -> Rows:
    cache, pages, ids = subject.cache(), subject.pages(), subject.ids
    start = len(ids) - sum(steps)
    prefill(subject.model, cache, pages, ids[:start], 64)
    at, outputs = start, []
    for step in steps:
        tree = chain_tree(pages, at + 1, ids[at : at + step])
        outputs.append(run(subject.model, cache, trees=[tree], capture=CAPTURE))
        at += step
    return Rows(
        start,
        torch.cat([output.logits for output in outputs]),
        torch.cat([output.captured for output in outputs]),
        *kept(cache, pages, len(ids)),
    )


def tree_with_siblings(subject: Subject) -> Rows:
    """Nine positions as one path of a tree, wrong siblings at every depth; its KV is then compacted."""
    cache, pages, ids = subject.cache(), subject.pages(), subject.ids
    start = len(ids) - 9
    prefill(subject.model, cache, pages, ids[:start], len(ids))
    tokens, parents, right = [ids[start]], [-1], [0]
    for depth, token in enumerate(ids[start + 1 :]):
        wrong = [(token + 1 + other) % subject.model.config.vocab_size for other in range(depth % 3)]
        parent = right[-1]
        tokens += [*wrong, token]
        parents += [parent] * (len(wrong) + 1)
        right.append(len(tokens) - 1)
        if wrong:
            # A second level below a wrong sibling makes paths of several lengths.
            tokens.append(token)
            parents.append(len(tokens) - 3)
    output = run(subject.model, cache, trees=[Tree(pages, start + 1, tokens, parents)], capture=CAPTURE)
    nodes = torch.tensor(right)
    table = torch.tensor(pages)
    cache.move(
        physical_slots(table, start + nodes, PAGE),
        physical_slots(table, torch.arange(start, len(ids)), PAGE),
    )
    return Rows(start, output.logits[nodes], output.captured[nodes], *kept(cache, pages, len(ids)))


def among_neighbours(subject: Subject) -> Rows:
    """A prefill chunk and a verified chain of the subject between chunks and trees of other sequences."""
    cache, pages, ids = subject.cache(), subject.pages(), subject.ids
    vocab = subject.model.config.vocab_size
    middle, last = len(ids) - 60, len(ids) - 6
    prefill(subject.model, cache, pages, ids[:middle], 50)
    other = subject.free_pages(3 * 240)
    longer, shorter, third = other[:15], other[15:30], other[30:45]
    run(
        subject.model,
        cache,
        [Chain(longer, 0, random_ids(200, vocab, 8)), Chain(shorter, 0, random_ids(2, vocab, 9))],
    )
    chunk = run(
        subject.model,
        cache,
        [
            Chain(third, 0, random_ids(77, vocab, 10)),
            Chain(pages, middle, ids[middle:last]),
        ],
        [chain_tree(shorter, 3, random_ids(1, vocab, 11))],
        capture=CAPTURE,
    )
    verified = run(
        subject.model,
        cache,
        [Chain(third, 77, random_ids(5, vocab, 12))],
        [
            Tree(longer, 201, random_ids(4, vocab, 13), [-1, 0, 0, 2]),
            chain_tree(pages, last + 1, ids[last:]),
            chain_tree(shorter, 4, random_ids(11, vocab, 14)),
        ],
        capture=CAPTURE,
    )
    mine, chunk_rows = slice(5 + 4, 5 + 4 + 6), slice(77, 77 + last - middle)
    return Rows(
        middle,
        torch.cat([chunk.logits[chunk_rows], verified.logits[mine]]),
        torch.cat([chunk.captured[chunk_rows], verified.captured[mine]]),
        *kept(cache, pages, len(ids)),
    )


WAYS = {
    "in chunks of 7": in_chunks(7),
    "in chunks of 64": in_chunks(64),
    "in chunks of 200": in_chunks(200),
    "token by token": token_by_token,
    "verified chains": verify_chains,
    "tree with siblings": tree_with_siblings,
    "among neighbours": among_neighbours,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_demo_model_the_same_bits(way: str, demo: Subject) -> None:
    assert_same_rows(WAYS[way](demo), demo.rows)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_int4_weights_the_same_bits(way: str, demo_int4: Subject) -> None:
    assert_same_rows(WAYS[way](demo_int4), demo_int4.rows)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_every_family_the_same_bits(way: str, tiny: Subject) -> None:
    assert_same_rows(WAYS[way](tiny), tiny.rows)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_eager_layers_the_same_bits(way: str, eager: Subject) -> None:
    assert_same_rows(WAYS[way](eager), eager.rows)


@pytest.mark.parametrize("way", ["in chunks of 200", "token by token", "tree with siblings"])
def test_one_thread_gives_the_bits_of_two(way: str, demo: Subject) -> None:
    torch.set_num_threads(1)
    try:
        assert_same_rows(WAYS[way](demo), demo.rows)
    finally:
        torch.set_num_threads(2)


def test_the_largest_chunk_gives_the_bits_of_small_ones(demo: Subject) -> None:
    model, ids = demo.model, random_ids(512, demo.model.config.vocab_size, 5)
    pages = scattered_pages(512)
    cache = empty_cache(model, (max(pages) + 1) * PAGE, fill=torch.nan)
    small = prefill(model, cache, pages, ids, 100)
    cache = empty_cache(model, (max(pages) + 1) * PAGE, fill=torch.nan)
    assert_same_rows(prefill(model, cache, pages, ids, 512), small)


def test_cutting_a_segment_into_pieces_changes_no_bit(
    eager: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.attention.torch_backend.PIECE_BYTES", 1 << 14)
    monkeypatch.setattr("common.attention.torch_backend.MOST_PIECE_BYTES", 1 << 14)
    assert_same_rows(in_chunks(150)(eager), eager.rows)
    assert_same_rows(tree_with_siblings(eager), eager.rows)


def test_a_forward_over_another_request_leaves_no_trace(demo: Subject) -> None:
    """Rejected rows are overwritten in place and pages change hands."""
    model, ids, pages = demo.model, demo.ids, demo.pages()
    cache = demo.cache()
    prefill(model, cache, pages, random_ids(len(ids), model.config.vocab_size, 6), 200)
    start = len(ids) - 30
    prefill(model, cache, pages, ids[:start], 200)
    wrong = random_ids(12, model.config.vocab_size, 7)
    run(model, cache, trees=[chain_tree(pages, start + 1, wrong)])
    output = run(model, cache, trees=[chain_tree(pages, start + 1, ids[start:])], capture=CAPTURE)
    assert_same_rows(Rows(start, output.logits, output.captured, *kept(cache, pages, len(ids))), demo.rows)
