"""An EAGLE-3 head with gradients, unrolled over its own features as it will be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from common.model.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, Checkpoint, layer_prefix
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from common.model.rope import RopeTable
from training.batches import Batch, Span


class TrainableHead(nn.Module):
    """Parameters in float32, products in `dtype`. Heads without biases and optional norms.

    embedding: [vocab, hidden], frozen. target_ids: int64 [draft_vocab], ascending. weights: to start from.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: Mapping[str, torch.Tensor],
        *,
        embedding: torch.Tensor,
        target_ids: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.target_ids = target_ids
        self.embedding = embedding.to(dtype)
        self.rope = RopeTable(config.rope, config.head_dim, config.max_context)
        for name in PARAMETERS:
            self.register_parameter(name, nn.Parameter(weights[name].detach().float().clone()))

    def parameter(self, name: str) -> nn.Parameter:
        """One of PARAMETERS."""

        return self.get_parameter(name)

    def unroll(self, batch: Batch) -> Unrolled:
        return Unrolled(self, {name: getattr(self, name).to(self.dtype) for name in PARAMETERS}, batch)

    def forward(self, batch: Batch, steps: int) -> list[torch.Tensor]:
        """The normed outputs of every unrolled step, [loss rows, hidden] each, in `dtype`."""

        unrolled = self.unroll(batch)
        return [unrolled.step() for _ in range(steps)]

    def weights(self, dtype: torch.dtype) -> Eagle3Weights:
        """A copy, as it is written and served."""

        copies = {name: getattr(self, name).detach().to(dtype).clone() for name in PARAMETERS}
        d2t = self.target_ids - torch.arange(self.target_ids.shape[0])
        return Eagle3Weights(**copies, d2t=d2t)


class Unrolled:
    """The draft steps of one batch, one after the other. live: int64, the loss rows that still draft."""

    def __init__(self, head: TrainableHead, cast: Mapping[str, torch.Tensor], batch: Batch) -> None:
        self._head = head
        self._cast = cast
        self._batch = batch
        self._query_size = head.config.heads * head.config.head_dim
        fused = F.linear(batch.aux.to(head.dtype), cast["fc"])
        x = self._input(fused, batch.next_ids)
        self._keys, self._values = self._keys_values(
            F.linear(x, cast["qkv"][self._query_size :]), batch.positions
        )
        self._first = x.index_select(0, batch.loss_rows)
        self._feature = fused.index_select(0, batch.loss_rows)
        self._positions = batch.positions.index_select(0, batch.loss_rows)
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._spans = batch.spans
        self.live = torch.arange(batch.loss_rows.shape[0])
        self.steps = 0

    def step(self) -> torch.Tensor:
        """The normed outputs of the live rows."""

        cast, query_size = self._cast, self._query_size
        positions = self._positions + self.steps
        if self.steps:
            ids = self._batch.step_ids[self.steps, self.live]
            qkv = F.linear(self._input(self._feature, ids), cast["qkv"])
            self._own.append(self._keys_values(qkv[:, query_size:], positions))
            queries = self._rotated(qkv[:, :query_size], positions)
        else:
            queries = self._rotated(F.linear(self._first, cast["qkv"][:query_size]), positions)
        attended = torch.cat(
            [_attend(span, queries, self._keys, self._values, self._own) for span in self._spans]
        )
        residual = self._feature + F.linear(attended, cast["output"])
        normed = self._norm(residual, cast["post_attention_layernorm"])
        gate, up = F.linear(normed, cast["gate_up"]).chunk(2, dim=-1)
        self._feature = residual + F.linear(F.silu(gate) * up, cast["down"])
        self.steps += 1
        return self._norm(self._feature, cast["norm"])

    def keep(self, rows: torch.Tensor) -> None:
        """Only these of the live rows go on. rows: int64, ascending, one or more, indices into `live`."""

        self.live = self.live[rows]
        self._feature = self._feature.index_select(0, rows)
        self._positions = self._positions[rows]
        self._own = [(keys.index_select(0, rows), values.index_select(0, rows)) for keys, values in self._own]
        spans = []
        for span in self._spans:
            first, last = torch.searchsorted(rows, torch.tensor([span.loss.start, span.loss.stop])).tolist()
            if last > first:
                mask = span.mask[rows[first:last] - span.loss.start]
                spans.append(Span(span.rows, slice(first, last), mask))
        self._spans = tuple(spans)

    def _input(self, feature: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        embeds = self._norm(self._head.embedding.index_select(0, ids), self._cast["input_layernorm"])
        return torch.cat([embeds, self._norm(feature, self._cast["hidden_norm"])], dim=-1)

    def _keys_values(self, kv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv.chunk(2, dim=-1)
        return self._rotated(keys, positions), self._by_head(values)

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, n × head_dim] → [rows, n, head_dim]"""

        wide = self._by_head(heads).float()
        cos = self._head.rope.cos.index_select(0, positions).unsqueeze(1)
        sin = self._head.rope.sin.index_select(0, positions).unsqueeze(1)
        swapped = wide.roll(self._head.config.head_dim // 2, dims=-1)
        return (wide * cos + swapped * sin).to(heads.dtype)

    def _by_head(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.view(heads.shape[0], -1, self._head.config.head_dim)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._head.config.rms_eps)


PARAMETERS = (
    "fc",
    "input_layernorm",
    "hidden_norm",
    "qkv",
    "output",
    "post_attention_layernorm",
    "gate_up",
    "down",
    "norm",
    "lm_head",
)


def _attend(
    span: Span,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """One sequence: a query sees the first step's keys up to its position and, of every later step, the entry
    of its own position. queries: [loss rows, heads, head_dim]. own: keys and values of every later step.
    Returns [the span's loss rows, heads × head_dim]."""

    rows, loss = span.rows, span.loss
    kv_heads, head_dim = keys.shape[1:]
    count, shared = loss.stop - loss.start, rows.stop - rows.start
    grouped = queries[loss].view(count, kv_heads, -1, head_dim)
    q = grouped.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)  # [kv_heads, group × count, head_dim]
    scores = (q @ keys[rows].permute(1, 2, 0)).float().view(kv_heads, -1, count, shared) + span.mask
    diagonals = [(grouped * key[loss].unsqueeze(2)).float().sum(-1).permute(1, 2, 0) for key, _ in own]
    if diagonals:
        scores = torch.cat([scores, torch.stack(diagonals, dim=-1)], dim=-1)
    chances = (scores * head_dim**-0.5).softmax(-1).to(queries.dtype)
    mixed = chances[..., :shared].reshape(kv_heads, -1, shared) @ values[rows].transpose(0, 1)
    mixed = mixed.view(kv_heads, -1, count, head_dim).permute(2, 0, 1, 3)  # [count, kv_heads, group, …]
    for at, (_, value) in enumerate(own):
        share = chances[..., shared + at].permute(2, 0, 1).unsqueeze(-1)
        mixed = mixed + share * value[loss].unsqueeze(2)
    return torch.flatten(mixed, start_dim=1)


def initial_weights(
    config: Eagle3Config, target: Checkpoint, target_ids: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """A head that starts as a copy of the target's end: the layer behind the last auxiliary state, reading
    that state, the target's last norm and its output rows. Where shapes differ, random ones."""

    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    weights = {
        "fc": random(hidden, config.aux_size) * 0.1,
        "input_layernorm": torch.ones(hidden),
        "hidden_norm": torch.ones(hidden),
        "qkv": random(query + 2 * key, 2 * hidden),
        "output": random(hidden, query),
        "post_attention_layernorm": torch.ones(hidden),
        "gate_up": random(2 * inner, hidden),
        "down": random(hidden, inner),
        "norm": torch.ones(hidden),
        "lm_head": random(config.draft_vocab_size, hidden),
    }
    source = target.config
    if source.hidden_size != hidden:
        return weights
    weights["fc"][:, -hidden:] += torch.eye(hidden)
    weights["norm"] = target.tensor(FINAL_NORM).float()
    head = target.tensor(EMBEDDING if source.tied_embeddings else LM_HEAD)
    weights["lm_head"] = head.index_select(0, target_ids).float()
    prefix = layer_prefix(config.aux_layers[-1])
    weights["hidden_norm"] = target.tensor(f"{prefix}input_layernorm.weight").float()
    weights["post_attention_layernorm"] = target.tensor(f"{prefix}post_attention_layernorm.weight").float()
    if (source.heads, source.kv_heads, source.head_dim) == (config.heads, config.kv_heads, config.head_dim):
        parts = [target.tensor(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
        weights["qkv"][:, hidden:] = torch.cat(parts).float()
        weights["output"] = target.tensor(f"{prefix}self_attn.o_proj.weight").float()
    if source.intermediate_size == inner:
        gate_up = [target.tensor(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
        weights["gate_up"] = torch.cat(gate_up).float()
        weights["down"] = target.tensor(f"{prefix}mlp.down_proj.weight").float()
    return weights
