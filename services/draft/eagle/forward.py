"""The head's numeric work on shared memory: over the target's states, and in steps on its own features."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from common.attention.kv_cache import KvCache
from common.model.eagle3 import Eagle3Head
from services.draft.eagle.attention import DecodeAttention, DecodePlan, ExtendAttention, ExtendPlan
from services.draft.eagle.entries import Places
from services.draft.eagle.ranking import Predicted

Plan = TypeVar("Plan")


class HeadForward(Protocol[Plan]):
    """target_ids: int64 [draft_vocab], the target's id of every draft id. Plan: what one drafting's steps
    share."""

    @property
    def target_ids(self) -> torch.Tensor: ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features of positions whose states are the target's. [rows, states] → [rows, hidden]."""
        ...

    def extend(self, features: torch.Tensor, ids: torch.Tensor, plan: ExtendPlan) -> torch.Tensor:
        """Writes an entry per row: features of the target's position before, [rows, hidden], and the entry's
        own id, int64 [rows]. Returns the outputs of each slot's newest entry, [slots, hidden]."""
        ...

    def plan_steps(self, places: Places, most_nodes: int) -> Plan:
        """places: of the slots' committed entries. most_nodes: that a slot's tree expands."""
        ...

    def step(
        self,
        outputs: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Plan,
        paths: torch.Tensor,
    ) -> torch.Tensor:
        """One level of every tree: outputs of the nodes' parents [nodes, hidden], the nodes' ids, int64, and
        their rotation's positions, int64 [nodes]. paths: int64 [slots, nodes, levels], the numbers of a
        node's ancestors and its own, counted from 0 in each tree. Writes nothing that is shared. Returns the
        nodes' outputs."""
        ...

    def rank(self, outputs: torch.Tensor, width: int) -> Predicted:
        """What the head predicts behind each of the outputs."""
        ...


class EagleForward:
    """In plain torch. extend and decode are bound here and nowhere else. cache: one layer, the drafter's
    entries by the target's pages."""

    def __init__(
        self, head: Eagle3Head, cache: KvCache, extend: ExtendAttention, decode: DecodeAttention
    ) -> None:
        self._head = head
        self._cache = cache
        self._extend = extend
        self._decode = decode

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft_vocab]: the target's id of every draft id."""
        return self._head.target_ids

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.fuse(states)

    @torch.inference_mode()
    def extend(self, features: torch.Tensor, ids: torch.Tensor, plan: ExtendPlan) -> torch.Tensor:
        queries, keys, values = self._head.queries_keys_values(features, int64(ids), plan.positions)
        newest = queries.index_select(0, plan.last)
        attended = self._extend.attend(plan, self._cache, newest, keys, values)
        return self._head.output(features.index_select(0, plan.last), attended)

    @torch.inference_mode()
    def plan_steps(self, places: Places, most_nodes: int) -> DecodePlan:
        return self._decode.plan(self._cache, places, most_nodes)

    @torch.inference_mode()
    def step(
        self,
        outputs: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        plan: DecodePlan,
        paths: torch.Tensor,
    ) -> torch.Tensor:
        features = self._head.feature(outputs)
        queries, keys, values = self._head.queries_keys_values(features, int64(ids), positions)
        return self._head.output(features, plan.attend(queries, keys, values, paths))

    @torch.inference_mode()
    def rank(self, outputs: torch.Tensor, width: int) -> Predicted:
        logits = self._head.logits(outputs)
        return Predicted(logits, *logits.log_softmax(-1).topk(width, dim=-1))


def int64(ids: torch.Tensor) -> torch.Tensor:
    """The ids. Raises TypeError for another type."""
    if ids.dtype != torch.int64:
        raise TypeError(f"ids are {ids.dtype}; they are int64 wherever they leave their producer")
    return ids
