"""Captured steps on a CPU: the decoder layers over a padded batch, compiled kernels between packed linear
layers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from common.attention.kv_cache import KvCache
from common.graphs.padded import ROW_STEP, SMALL_ROWS, PaddedBatch, padded_rows
from common.kernels.decoder_cpu import DecoderKernels
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layers import DecoderLayer
from common.model.rope import RopeTable

Progress = Callable[[int, int], None]


class CapturedSteps:
    """Every forward runs at one of a few row counts, for which oneDNN has made its kernels once; all rows of
    a process go through the same kernels. embedding: bfloat16 [vocab, hidden]. Heads of the model are at most
    MAX_HEAD_DIM wide."""

    def __init__(
        self,
        kernels: DecoderKernels,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: tuple[DecoderLayer, ...],
        rope: RopeTable,
    ) -> None:
        self.numerics = kernels.identity
        self._kernels = kernels
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._rope = rope

    def run(
        self, batch: ForwardBatch, cache: KvCache, capture: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The residual stream after the last layer and on entering the layers of capture; bfloat16
        [rows, hidden] of the batch's own rows."""

        padded = PaddedBatch.of(batch, padded_rows(batch.ids.shape[0]))
        step = _Step(self._kernels, self._config, self._rope, self._embedding, padded)
        entering: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            step.enter(layer)
            if index in capture:
                entering[index] = step.residual[: padded.raw_rows].clone()
            step.compute(layer, cache.keys[index], cache.values[index])
        return step.leave()[: padded.raw_rows], entering

    @torch.inference_mode()
    def warm(self, max_rows: int, progress: Progress) -> None:
        """Make oneDNN's kernels for every size up to max_rows. progress is told sizes done and in all."""

        nothing = torch.empty(0, dtype=torch.int64)
        empty = ForwardBatch(nothing, nothing, nothing, (), nothing)
        sizes = [*SMALL_ROWS, *range(ROW_STEP, padded_rows(max_rows) + 1, ROW_STEP)]
        scratch = torch.zeros(2, 1, self._config.kv_heads, self._config.head_dim, dtype=torch.bfloat16)
        for done, rows in enumerate(sizes, start=1):
            padded = PaddedBatch.of(empty, rows)
            step = _Step(self._kernels, self._config, self._rope, self._embedding, padded)
            step.enter(self._layers[0])
            step.compute(self._layers[0], scratch[0], scratch[1])
            progress(done, len(sizes))


class _Step:
    """One forward's activations. residual: [rows, hidden], without what the last layer adds to it until the
    next `enter` or `leave`."""

    def __init__(
        self,
        kernels: DecoderKernels,
        config: ModelConfig,
        rope: RopeTable,
        embedding: torch.Tensor,
        batch: PaddedBatch,
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._rope = rope
        self._batch = batch
        self._longest = int(batch.kv_lens.max())
        self._threads = torch.get_num_threads()
        self.residual = embedding.index_select(0, batch.ids)
        self._delta: torch.Tensor | None = None
        self._normed = torch.empty_like(self.residual)
        self._attended = self.residual.new_empty(batch.rows, config.heads * config.head_dim)
        self._active = self.residual.new_empty(0)

    def enter(self, layer: DecoderLayer) -> None:
        """residual is what enters the layer, normed is its norm."""

        self._add_norm(layer.attention_norm.weight, layer.attention_norm.eps)

    def compute(self, layer: DecoderLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: the layer's memory, [positions, kv_heads, head_dim]."""

        self._delta = layer.attention.output(self._attend(layer, keys, values))
        self._add_norm(layer.mlp_norm.weight, layer.mlp_norm.eps)
        gate_up = layer.mlp.gate_up(self._normed)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if self._active.shape != (rows, size):
            self._active = gate_up.new_empty(rows, size)
        self._kernels.silu_mul(gate_up.data_ptr(), self._active.data_ptr(), rows, size, self._threads)
        self._delta = layer.mlp.down(self._active)

    def leave(self) -> torch.Tensor:
        assert self._delta is not None
        return self.residual.add_(self._delta)

    def _add_norm(self, weight: torch.Tensor, eps: float) -> None:
        rows, size = self.residual.shape
        self._kernels.add_norm(
            self.residual.data_ptr(),
            None if self._delta is None else self._delta.data_ptr(),
            weight.data_ptr(),
            self._normed.data_ptr(),
            rows,
            size,
            eps,
            self._threads,
        )

    def _attend(self, layer: DecoderLayer, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        config, batch, norms = self._config, self._batch, layer.attention.head_norms
        qkv = layer.attention.qkv(self._normed)
        self._kernels.attention(
            qkv.data_ptr(),
            None if norms is None else norms.query.weight.data_ptr(),
            None if norms is None else norms.key.weight.data_ptr(),
            0.0 if norms is None else norms.query.eps,
            self._rope.cos.data_ptr(),
            self._rope.sin.data_ptr(),
            config.head_dim**-0.5,
            batch.positions.data_ptr(),
            batch.write_slots.data_ptr(),
            batch.key_starts.data_ptr(),
            batch.key_slots.data_ptr(),
            batch.kv_len_sum,
            self._longest,
            keys.data_ptr(),
            values.data_ptr(),
            self._attended.data_ptr(),
            batch.rows,
            config.heads,
            config.kv_heads,
            config.head_dim,
            self._threads,
        )
        return self._attended
