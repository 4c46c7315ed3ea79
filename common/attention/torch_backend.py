"""Attention in plain torch operations, exact in the sense of `AttentionBackend`.

Scores and weighted values are batched matrix products over blocks of 64 keys, whose bits for a row depend
neither on the rows beside it nor on the number of products. The softmax uses the global maximum, which is
exact; sums over a block have a fixed length; blocks are added by an adjacent-pair tree, where absent blocks
are exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common.model.batch import AttentionSegment, ForwardBatch

BLOCK = 64
"""Keys of one product. Part of the numeric plan."""

PIECE_BYTES = 8 << 20
"""Aim for the temporaries of one piece (measured: larger ones leave the cache, smaller ones gather keys too
often). Larger segments are cut into pieces, which changes no bits."""

MOST_PIECE_BYTES = 32 << 20
"""Scores may take up to this where gathering the keys that they share costs a good part of it."""


class TorchAttention:
    """heads, kv_heads, head_dim: of the model. itemsize: bytes of an element of its queries."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        pieces = []
        rows = batch.ids.shape[0]
        # Where a row's heads stand in the pieces' outputs laid end to end.
        places = torch.full((rows, self.heads), -1, dtype=torch.int64)
        offset = 0
        for segment in batch.segments:
            for part in self._cut(segment, batch.positions):
                piece = self._piece(part, batch.positions)
                places.index_copy_(0, part.rows.flatten(), piece.places().flatten(0, 1) + offset)
                offset += piece.paths * piece.queries * self.heads
                pieces.append(piece)
        if rows and int(places.min()) < 0:
            missing = torch.nonzero(places[:, 0] < 0).flatten().tolist()
            raise ValueError(f"rows {missing[:8]} stand in no attention segment")
        return TorchPlan(tuple(pieces), places.flatten())

    def _cut(self, segment: AttentionSegment, positions: torch.Tensor) -> Iterator[AttentionSegment]:
        """Pieces of about PIECE_BYTES, each with the key blocks that its queries can see."""

        paths, queries = segment.rows.shape
        if segment.key_slots.shape[1] % BLOCK:
            raise ValueError(
                f"segment has {segment.key_slots.shape[1]} keys; a multiple of {BLOCK} is needed"
            )
        blocks = segment.key_slots.shape[1] // BLOCK
        path_bytes = blocks * self.kv_heads * BLOCK * self.head_dim * 4
        query_bytes = blocks * self.heads * (BLOCK * 10 + self.head_dim * 12)
        score_bytes = max(PIECE_BYTES, min(4 * path_bytes, MOST_PIECE_BYTES))
        queries_at_once = min(queries, max(1, score_bytes // query_bytes))
        paths_at_once = max(1, score_bytes // (path_bytes + queries_at_once * query_bytes))
        for p in range(0, paths, paths_at_once):
            for q in range(0, queries, queries_at_once):
                rows = segment.rows[p : p + paths_at_once, q : q + queries_at_once]
                seen = int(positions[rows.flatten()].max()) // BLOCK + 1
                if seen > blocks:
                    raise ValueError(
                        f"a row at position {seen * BLOCK - BLOCK} or later has only {blocks * BLOCK} keys"
                    )
                yield AttentionSegment(rows, segment.key_slots[p : p + paths_at_once, : seen * BLOCK])

    def _piece(self, segment: AttentionSegment, positions: torch.Tensor) -> Piece:
        rows, key_slots = segment.rows, segment.key_slots
        (paths, queries), blocks = rows.shape, key_slots.shape[1] // BLOCK
        group = self.heads // self.kv_heads
        row_positions = positions[rows]
        logical = torch.arange(blocks * BLOCK)
        # Memory behind a path's last query may hold anything. The path's first key is always written; there
        # its
        # weight is zero.
        written = logical <= row_positions.amax(dim=1, keepdim=True)
        key_slots = torch.where(written, key_slots, key_slots[:, :1])
        kv_head = torch.arange(self.kv_heads)
        key_index = key_slots.view(paths, 1, blocks * BLOCK) * self.kv_heads + kv_head.view(1, -1, 1)
        head = torch.arange(self.heads).view(1, self.kv_heads, 1, 1, group)
        query_index = (rows * self.heads).view(paths, 1, 1, queries, 1) + head
        hidden = logical.view(1, 1, blocks, 1, 1, BLOCK) > row_positions.view(paths, 1, 1, queries, 1, 1)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return Piece(
            paths=paths,
            queries=queries,
            blocks=blocks,
            kv_heads=self.kv_heads,
            group=group,
            query_index=query_index.expand(-1, -1, blocks, -1, -1).flatten(),
            key_index=key_index.flatten(),
            mask=mask,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Index tensors of one piece. B below is paths × kv_heads × blocks, M is queries × group.

    query_index: int64 [B × M] into [rows × heads]. key_index: int64 [B × 64] into [positions × kv_heads].
    mask: float32 [paths, 1, blocks, queries, 1, 64], −∞ for keys after the query, else 0.
    """

    paths: int
    queries: int
    blocks: int
    kv_heads: int
    group: int
    query_index: torch.Tensor
    key_index: torch.Tensor
    mask: torch.Tensor

    def places(self) -> torch.Tensor:
        """Where the output of (path, query, head) stands: int64 [paths, queries, heads]."""

        shape = (self.paths, self.kv_heads, self.queries, self.group)
        order = torch.arange(self.paths * self.kv_heads * self.queries * self.group).view(shape)
        return order.permute(0, 2, 1, 3).flatten(2)

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """queries: [rows × heads, head_dim]. keys, values: [positions × kv_heads, head_dim].
        Returns [paths × kv_heads × queries × group, head_dim] in the queries' dtype."""

        head_dim = queries.shape[1]
        products = self.paths * self.kv_heads * self.blocks
        width = self.queries * self.group
        q = queries.index_select(0, self.query_index).view(products, width, head_dim)
        k = keys.index_select(0, self.key_index).view(products, BLOCK, head_dim)
        v = values.index_select(0, self.key_index).view(products, BLOCK, head_dim)
        products_of_heads = torch.bmm(q, k.transpose(1, 2))  # [B, M, 64]
        scores = torch.add(
            products_of_heads.view(self.paths, self.kv_heads, self.blocks, self.queries, self.group, BLOCK),
            self.mask,
        ).view(-1, self.blocks, width, BLOCK)  # float32
        highest = scores.amax(dim=(1, 3), keepdim=True)
        weights = scores.sub_(highest).exp_()
        sums = torch.empty(*weights.shape[:3], head_dim + 1)
        torch.sum(weights, dim=-1, out=sums[..., head_dim])
        weighted = torch.bmm(weights.view(products, width, BLOCK).to(v.dtype), v)
        # Adding zero makes −0 into 0, so that an absent block changes no bit.
        torch.add(weighted.view(-1, self.blocks, width, head_dim), 0.0, out=sums[..., :head_dim])
        total = add_adjacent_pairs(sums)
        return (total[..., :head_dim] / total[..., head_dim:]).to(queries.dtype).view(-1, head_dim)


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """places: int64 [rows × heads] into the pieces' outputs laid end to end."""

    pieces: tuple[Piece, ...]
    places: torch.Tensor

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, heads, head_dim = queries.shape
        flat_queries = queries.reshape(rows * heads, head_dim)
        flat_keys, flat_values = keys.view(-1, head_dim), values.view(-1, head_dim)
        parts = [piece.attend(flat_queries, flat_keys, flat_values) for piece in self.pieces]
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs.index_select(0, self.places).view(rows, heads * head_dim)


def add_adjacent_pairs(terms: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 in the order ((t0 + t1) + (t2 + t3)) + …, to which trailing zeros add nothing.

    terms: float32 [batch, n, …], overwritten. Returns [batch, …].
    """

    while (count := terms.shape[1]) > 1:
        pairs = count // 2
        sums = terms[:, 0::2]
        sums[:, :pairs] += terms[:, 1::2]
        terms = sums
    return terms[:, 0]
