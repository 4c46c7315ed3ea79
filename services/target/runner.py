"""The target's device work: one forward for a round's chunks and trees, then the walk down every tree."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from common.attention.kv_cache import KvCache, kv_bytes_per_position
from common.attention.segments import build_batch, depths, physical_slots
from common.memory.free import free_memory
from common.messages.lifecycle import Configure
from common.model.llama import LlamaModel
from common.model.steps import CapturedRows
from common.sampling.sampler import sample
from common.sampling.tree import walk
from services.target.memory import HiddenBlock
from services.target.work import HiddenSpan, RoundResult, RoundWork, TreeResult, TreeRows, hidden_spans


class TargetRunner:
    """Owns the target's KV memory. Runs on the device thread alone.

    vocab_size: ids of the tokenizer; logits of a wider model past it are never sampled.
    """

    def __init__(self, model: LlamaModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._page_size = 0
        self._cache: KvCache | None = None
        self._embedding: torch.Tensor | None = None

    def allocate(self, configure: Configure) -> None:
        """KV memory of its own for every page, in place of any earlier. Raises MemoryError."""
        self._cache = None
        self._page_size = configure.page_size
        positions = configure.pages * configure.page_size
        _check_memory(positions * kv_bytes_per_position(self.model.config, self.model.dtype))
        self._cache = KvCache.allocate(self.model.config, positions, self.model.dtype)

    def read_embedding_at(self, memory: torch.Tensor | None) -> None:
        """From the next round on the model reads its embedding there: the same numbers, [ids, hidden size].
        None changes nothing."""
        self._embedding = memory

    def execute(self, work: RoundWork, hidden: HiddenBlock | None = None) -> RoundResult:
        """hidden: where the rows of work.capture go; the forward writes them there, in this call alone. The
        tag goes first and comes last, so that a reader sees whether the rows are those of its round: a
        forward that failed leaves none."""
        started = time.perf_counter()
        assert self._cache is not None
        if self._embedding is not None:
            self.model.move_embedding(self._embedding)
            self._embedding = None
        batch = build_batch(work.chunks, work.trees, self._page_size)
        capture = None
        if work.capture is not None and hidden is not None:
            hidden.tag.zero_()
            capture = CapturedRows(work.capture.layers, hidden.rows)
        logits = self.model.forward(batch, self._cache, capture=capture)
        results = []
        paths = []
        first = 0
        for tree in work.trees:
            result, path = self._accept(tree, logits[first : first + len(tree.tokens)])
            results.append(result)
            paths.append(path)
            first += len(tree.tokens)
        spans: tuple[HiddenSpan, ...] = ()
        if capture is not None and hidden is not None:
            spans = hidden_spans(work, results)
            _keep(hidden.rows, _rows_of(spans, work, paths))
            hidden.tag.fill_(work.round)
        elapsed_us = round((time.perf_counter() - started) * 1e6)
        return RoundResult(work.group, work.round, tuple(results), elapsed_us, hidden=spans)

    def _accept(self, tree: TreeRows, logits: torch.Tensor) -> tuple[TreeResult, list[int]]:
        """Also the nodes of the accepted path. logits: float32 [nodes, vocab]. The token sampled at a node
        stands one position behind the node."""
        rows = logits.numpy()[:, : self.vocab_size]
        depth = depths(tree.parents)

        def choose(node: int) -> int:
            return sample(rows[node], tree.sampling, tree.base + depth[node])

        path, bonus = walk(tree.tokens, tree.parents, choose)
        self._compact(tree, path)
        return TreeResult(tree.slot, (*(tree.tokens[node] for node in path), bonus)), path

    def _compact(self, tree: TreeRows, path: list[int]) -> None:
        """Move the accepted path's KV from the nodes' places to its logical positions."""
        assert self._cache is not None
        moved = [(node, place) for place, node in enumerate(path, start=1) if node != place]
        if not moved:
            return
        pages = torch.tensor(tree.pages)
        first = tree.base - 1
        nodes, places = torch.tensor(moved).T
        self._cache.move(
            physical_slots(pages, first + nodes, self._page_size),
            physical_slots(pages, first + places, self._page_size),
        )


def _rows_of(spans: Iterable[HiddenSpan], work: RoundWork, paths: Sequence[Sequence[int]]) -> list[int]:
    """Rows of the forward, by row of the block. paths: accepted nodes of each tree."""
    rows: dict[int, list[int]] = {span.slot: [] for span in spans}
    first = 0
    for chunk in work.chunks:
        rows[chunk.slot].extend(range(first, first + len(chunk.ids)))
        first += len(chunk.ids)
    for tree, path in zip(work.trees, paths, strict=True):
        rows[tree.slot].extend((first, *(first + node for node in path)))
        first += len(tree.tokens)
    return [row for own in rows.values() for row in own]


def _keep(block: torch.Tensor, rows: Iterable[int]) -> None:
    """Move these rows of a block, [rows, states], to its beginning, in this order. Only those that change
    place are copied: of chunks alone none. All are read before one is written, because the rows of a chunk
    move towards the end where the slot before it has a tree too."""
    moved = [(row, place) for place, row in enumerate(rows) if row != place]
    if moved:
        sources, places = torch.tensor(moved).T
        block[places] = block[sources]


def _check_memory(needed: int) -> None:
    """Memory is handed out before it is there; a process that then touches it is killed without a word."""
    free = free_memory()
    if needed > free.bytes:
        raise MemoryError(f"{needed} bytes are needed, {free.bytes} are free ({free.bound})")
