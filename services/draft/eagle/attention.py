"""The head's two attention backends over paged entries. The target's verify has one of its own.

Both read keys in logical order with a mask over what is valid; a place that is masked is read at physical
position 0, which belongs to no slot, so that what unwritten memory holds cannot spoil a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.attention.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class ExtendPart:
    """Slots whose new entries are attended together. rows: int64 [slots, queries], padding repeats a row of
    the slot. key_slots: int64 [slots, keys], physical positions. mask: bool [slots, queries, keys]."""

    rows: torch.Tensor
    key_slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """write_slots: int64 [rows], physical positions of the new entries. positions: int64 [rows], their
    rotation's."""

    write_slots: torch.Tensor
    positions: torch.Tensor
    parts: tuple[ExtendPart, ...]


class ExtendAttention:
    """Draft extend: causal over the entries of committed positions, those of the call included."""

    def attend(
        self,
        plan: ExtendPlan,
        cache: KvCache,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Writes keys and values [rows, kv_heads, head_dim]. queries: [rows, heads, head_dim], scaled.
        Returns [rows, heads × head_dim]."""
        cache.write(0, plan.write_slots, keys, values)
        attended = torch.empty_like(queries)
        for part in plan.parts:
            slots, count = part.rows.shape
            own = queries.index_select(0, part.rows.flatten()).view(slots, count, *queries.shape[1:])
            known_keys, known_values = gather(cache, part.key_slots)
            attended[part.rows] = grouped_attention(own, known_keys, known_values, part.mask)
        return attended.flatten(1)


class DecodeAttention:
    """Draft decode: trees that grow level by level over entries that stay as they are."""

    def plan(
        self, cache: KvCache, key_slots: torch.Tensor, valid: torch.Tensor, most_nodes: int
    ) -> DecodePlan:
        """key_slots: int64 [slots, keys], physical positions. valid: bool [slots, keys]. most_nodes: that a
        slot's tree expands."""
        keys, values = (F.pad(part, (0, 0, 0, most_nodes)) for part in gather(cache, key_slots))
        return DecodePlan(keys, values, valid)


class DecodePlan:
    """One drafting's entries and those of its trees, which are its own and are dropped with it.

    keys, values: [slots, kv_heads, keys + most_nodes, head_dim]. valid: bool [slots, keys].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> None:
        self._keys = keys
        self._values = values
        self._valid = valid
        self._end = valid.shape[1]

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ancestors: torch.Tensor
    ) -> torch.Tensor:
        """One level. queries: [slots × nodes, heads, head_dim], scaled. keys, values: [slots × nodes,
        kv_heads, head_dim]. ancestors: bool [slots, nodes, nodes so far], each node among its own. Returns
        [slots × nodes, heads × head_dim]."""
        slots, nodes, _ = ancestors.shape
        end = self._end + nodes
        self._keys[:, :, self._end : end] = keys.view(slots, nodes, *keys.shape[1:]).transpose(1, 2)
        self._values[:, :, self._end : end] = values.view(slots, nodes, *values.shape[1:]).transpose(1, 2)
        self._end = end
        committed = self._valid.unsqueeze(1).expand(slots, nodes, -1)
        attended = grouped_attention(
            queries.view(slots, nodes, *queries.shape[1:]),
            self._keys[:, :, :end],
            self._values[:, :, :end],
            torch.cat([committed, ancestors], dim=-1),
        )
        return attended.flatten(2).flatten(0, 1)


def extend_parts(
    lengths: Sequence[int], starts: torch.Tensor, key_slots: torch.Tensor, valid: torch.Tensor, few: int
) -> tuple[ExtendPart, ...]:
    """Slots with at most `few` new entries together, each other one alone, with the keys that it can see.

    lengths: new entries of each slot; their rows follow one another in this order. starts: int64 [slots],
    position of each one's first. key_slots, valid: [slots, keys], the new entries included.
    """
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + length)
    together = [index for index, length in enumerate(lengths) if length <= few]
    groups = [together] if together else []
    groups += [[index] for index, length in enumerate(lengths) if length > few]
    parts = []
    for group in groups:
        most = max(lengths[index] for index in group)
        offsets = torch.arange(most)
        last = torch.tensor([lengths[index] - 1 for index in group]).unsqueeze(1)
        own = torch.minimum(offsets, last)  # [slots, queries]
        chosen = torch.tensor(group)
        positions = starts.index_select(0, chosen).unsqueeze(1) + own
        keys = int(positions.max()) + 1
        seen = torch.arange(keys) <= positions.unsqueeze(-1)
        parts.append(
            ExtendPart(
                own + torch.tensor([firsts[index] for index in group]).unsqueeze(1),
                key_slots.index_select(0, chosen)[:, :keys],
                seen & valid.index_select(0, chosen)[:, None, :keys],
            )
        )
    return tuple(parts)


def gather(cache: KvCache, key_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """key_slots: int64 [slots, keys]. Keys and values: [slots, kv_heads, keys, head_dim]."""
    flat, shape = key_slots.flatten(), (*key_slots.shape, *cache.keys.shape[2:])
    keys = cache.keys[0].index_select(0, flat).view(shape).transpose(1, 2)
    return keys, cache.values[0].index_select(0, flat).view(shape).transpose(1, 2)


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """queries: [slots, queries, heads, head_dim], scaled. keys, values: [slots, kv_heads, keys, head_dim].
    mask: bool [slots, queries, keys], true where a key is seen. Returns the queries' shape."""
    slots, count, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # The queries of a group of heads are so many more queries of one head.
    q = queries.view(slots, count, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = mask.unsqueeze(1).expand(slots, group, count, -1).flatten(1, 2).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, scale=1.0)
    by_head = out.view(slots, kv_heads, group, count, head_dim)
    return by_head.permute(0, 3, 1, 2, 4).reshape(slots, count, heads, head_dim)
