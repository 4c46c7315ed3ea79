"""The head's two attention backends over paged entries. The target's verify has one of its own.

Both read the slots' valid entries in logical order; holes are not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.attention.kv_cache import KvCache
from services.draft.eagle.entries import Places


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """write_slots: int64 [rows], physical positions of the new entries. positions: int64 [rows], their
    rotation's. last: int64 [slots], the row of each slot's newest entry. places: of the slots' entries, the
    new ones included."""

    write_slots: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    places: Places


class ExtendAttention:
    """Draft extend: over the entries of committed positions. In a head of one layer an entry does not depend
    on those before it, so only the newest of each slot, from which drafting goes on, has to attend."""

    def attend(
        self,
        plan: ExtendPlan,
        cache: KvCache,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Writes keys and values [rows, kv_heads, head_dim]. queries: [slots, heads, head_dim], scaled, of
        the newest entries. Returns [slots, heads × head_dim]."""
        cache.write(0, plan.write_slots, keys, values)
        key_slots, valid = plan.places.padded()
        known_keys, known_values = gather(cache, key_slots)
        attended = grouped_attention(queries.unsqueeze(1), known_keys, known_values, valid.unsqueeze(1))
        return attended.flatten(1)


class DecodeAttention:
    """Draft decode: trees that grow level by level over entries that stay as they are."""

    def plan(self, cache: KvCache, places: Places, most_nodes: int) -> DecodePlan:
        """most_nodes: that a slot's tree expands."""
        key_slots, valid = places.padded()
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
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paths: torch.Tensor
    ) -> torch.Tensor:
        """One level. queries: [slots × nodes, heads, head_dim], scaled. keys, values: [slots × nodes,
        kv_heads, head_dim]. paths: as of `HeadForward.step`. Returns [slots × nodes, heads × head_dim]."""
        slots, nodes, _ = paths.shape
        end = self._end + nodes
        self._keys[:, :, self._end : end] = keys.view(slots, nodes, *keys.shape[1:]).transpose(1, 2)
        self._values[:, :, self._end : end] = values.view(slots, nodes, *values.shape[1:]).transpose(1, 2)
        self._end = end
        ancestors = torch.zeros(slots, nodes, end - self._valid.shape[1], dtype=torch.bool)
        ancestors.scatter_(2, paths, True)
        committed = self._valid.unsqueeze(1).expand(slots, nodes, -1)
        attended = grouped_attention(
            queries.view(slots, nodes, *queries.shape[1:]),
            self._keys[:, :, :end],
            self._values[:, :, :end],
            torch.cat([committed, ancestors], dim=-1),
        )
        return attended.flatten(2).flatten(0, 1)


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
