"""The target's device work: one forward for a round's chunks and trees, then the walk down every tree."""

from __future__ import annotations

import time

import torch

from common.attention.kv_cache import KvCache, kv_bytes_per_position
from common.attention.segments import build_batch, depths, physical_slots
from common.memory.free import free_memory
from common.messages.lifecycle import Configure
from common.model.llama import LlamaModel
from common.sampling.sampler import sample
from common.sampling.tree import walk
from services.target.work import RoundResult, RoundWork, TreeResult, TreeRows


class TargetRunner:
    """Owns the target's KV memory. Runs on the device thread alone.

    vocab_size: ids of the tokenizer; logits of a wider model past it are never sampled.
    """

    def __init__(self, model: LlamaModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._page_size = 0
        self._cache: KvCache | None = None

    def allocate(self, configure: Configure) -> None:
        """KV memory of its own for every page, in place of any earlier. Raises MemoryError."""
        self._cache = None
        self._page_size = configure.page_size
        positions = configure.pages * configure.page_size
        _check_memory(positions * kv_bytes_per_position(self.model.config, self.model.dtype))
        self._cache = KvCache.allocate(self.model.config, positions, self.model.dtype)

    def execute(self, work: RoundWork) -> RoundResult:
        started = time.perf_counter()
        assert self._cache is not None
        batch = build_batch(work.chunks, work.trees, self._page_size)
        logits = self.model.forward(batch, self._cache).logits
        results = []
        first = 0
        for tree in work.trees:
            results.append(self._accept(tree, logits[first : first + len(tree.tokens)]))
            first += len(tree.tokens)
        elapsed_us = round((time.perf_counter() - started) * 1e6)
        return RoundResult(work.group, work.round, tuple(results), elapsed_us)

    def _accept(self, tree: TreeRows, logits: torch.Tensor) -> TreeResult:
        """logits: float32 [nodes, vocab]. The token sampled at a node stands one position behind the node."""
        rows = logits.numpy()[:, : self.vocab_size]
        depth = depths(tree.parents)

        def choose(node: int) -> int:
            return sample(rows[node], tree.sampling, tree.base + depth[node])

        path, bonus = walk(tree.tokens, tree.parents, choose)
        self._compact(tree, path)
        return TreeResult(tree.slot, (*(tree.tokens[node] for node in path), bonus))

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


def _check_memory(needed: int) -> None:
    """Memory is handed out before it is there; a process that then touches it is killed without a word."""
    free = free_memory()
    if needed > free.bytes:
        raise MemoryError(f"{needed} bytes are needed, {free.bytes} are free ({free.bound})")
