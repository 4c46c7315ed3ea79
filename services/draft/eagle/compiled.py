"""The head's numeric work in the compiled kernels: an extend or a level of trees is one call, attention
included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.kv_cache import KvCache
from common.model.eagle3_compiled import CompiledHead, HeadKeys
from services.draft.eagle.attention import ExtendPlan
from services.draft.eagle.entries import Places
from services.draft.eagle.forward import int64
from services.draft.eagle.growth import Shape
from services.draft.eagle.ranking import Predicted


class ExtendKeys:
    """Draft extend: the newest entry of each slot reads the valid ones where they lie, its own among them."""

    def plan(self, plan: ExtendPlan) -> HeadKeys:
        counts = plan.places.counts
        return HeadKeys(plan.write_slots, plan.last, counts, counts.cumsum(0) - counts, plan.places.known)


class DecodeKeys:
    """Draft decode: trees that grow level by level in memory of their own."""

    def plan(self, cache: KvCache, places: Places, most_nodes: int) -> GrowingKeys:
        """As of `HeadForward.plan_steps`."""
        return GrowingKeys(cache, places, most_nodes)


class GrowingKeys:
    """One drafting's entries: the slots' valid ones side by side, and behind them the nodes of every slot's
    tree. Dropped with the drafting."""

    def __init__(self, cache: KvCache, places: Places, most_nodes: int) -> None:
        known, self._counts = places.known, places.counts
        slots = self._counts.shape[0]
        shape = (1, known.shape[0] + slots * most_nodes, *cache.keys.shape[2:])
        self.cache = KvCache(cache.keys.new_empty(shape), cache.values.new_empty(shape))
        torch.index_select(cache.keys[0], 0, known, out=self.cache.keys[0, : known.shape[0]])
        torch.index_select(cache.values[0], 0, known, out=self.cache.values[0, : known.shape[0]])
        # int64 [slots, 1, 1]: where each tree begins.
        self._trees = (known.shape[0] + torch.arange(slots) * most_nodes).view(-1, 1, 1)
        firsts = self._counts.cumsum(0) - self._counts
        committed = firsts.unsqueeze(1) + torch.arange(int(self._counts.max()))
        # Each node reads its path, which ends at column MOST_LEVELS, and from there on its slot's entries.
        width = MOST_LEVELS + committed.shape[1]
        self._reads = torch.empty(slots, MOST_NODES, width, dtype=torch.int64)
        self._reads[:, :, MOST_LEVELS:] = committed.unsqueeze(1)

    def next_level(self, paths: torch.Tensor) -> HeadKeys:
        """As of `HeadForward.step`."""
        slots, nodes, levels = paths.shape
        begin = MOST_LEVELS - levels
        places = paths + self._trees
        self._reads[:, :nodes, begin:MOST_LEVELS] = places
        by_slot, by_node, _ = self._reads.stride()
        starts = (torch.arange(slots) * by_slot + begin).unsqueeze(1) + torch.arange(nodes) * by_node
        return HeadKeys(
            places[:, :, -1].flatten().contiguous(),
            torch.arange(slots * nodes),
            (self._counts + levels).repeat_interleave(nodes),
            starts.flatten(),
            self._reads,
        )


MOST_LEVELS = 64
MOST_NODES = 16
"""Of a level."""


@dataclass(frozen=True, slots=True)
class CompiledForward:
    """extend and decode are bound here and nowhere else. cache: one layer, the drafter's entries by the
    target's pages."""

    head: CompiledHead
    cache: KvCache
    extend_keys: ExtendKeys
    decode_keys: DecodeKeys

    @property
    def target_ids(self) -> torch.Tensor:
        return self.head.target_ids

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(states)

    def extend(self, features: torch.Tensor, ids: torch.Tensor, plan: ExtendPlan) -> torch.Tensor:
        keys = self.extend_keys.plan(plan)
        return self.head.layer(features, int64(ids), plan.positions, self.cache, keys, fed_back=False)

    def grow(
        self,
        outputs: torch.Tensor,
        bases: Sequence[int],
        nodes: Sequence[int],
        places: Places,
        shape: Shape,
    ) -> list[tuple[list[int], list[int]]]:
        """Greedy trees, all levels in one call. As of `grow` and `HeadForward.plan_steps`."""
        return self.head.grow(
            outputs,
            bases,
            nodes,
            self.cache,
            places.known,
            places.counts,
            width=shape.width,
            levels=shape.levels(max(nodes)),
        )

    def plan_steps(self, places: Places, most_nodes: int) -> GrowingKeys:
        return self.decode_keys.plan(self.cache, places, most_nodes)

    def step(
        self,
        outputs: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: GrowingKeys,
        paths: torch.Tensor,
    ) -> torch.Tensor:
        keys = plan.next_level(paths)
        return self.head.layer(outputs, int64(ids), positions, plan.cache, keys, fed_back=True)

    def rank(self, outputs: torch.Tensor, width: int) -> Predicted:
        return Predicted(*self.head.rank(outputs, width))
