"""Captured steps on a CPU: the decoder layers over a padded batch, in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from common.attention.kv_cache import KvCache
from common.graphs.padded import ROW_STEP, SMALL_ROWS, PaddedBatch, padded_rows
from common.kernels.decoder_cpu import BLOCK_INPUTS, DecoderKernels, Layer, Memory, Rows, Shape
from common.kernels.packed import PackedMatrix
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layers import DecoderLayer, RmsNorm
from common.model.linear import Linear
from common.model.rope import RopeTable
from common.model.steps import CapturedRows

Progress = Callable[[int, int], None]


class CapturedSteps:
    """Every forward runs at one of a few row counts; all rows of a process go through the same kernels.

    embedding: bfloat16 [vocab, hidden]. layers: their linear layers are `PackedMatrix`. Heads of the model
    are at most MAX_HEAD_DIM wide.
    """

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
        self._kept_alive = layers
        self._layers = (Layer * len(layers))(*(_described(layer) for layer in layers))
        self._rope = rope

    def run(self, batch: ForwardBatch, cache: KvCache, capture: CapturedRows | None = None) -> torch.Tensor:
        """The residual stream after the last layer: bfloat16 [rows, hidden], of the batch's own rows."""

        padded = PaddedBatch.of(batch, padded_rows(batch.ids.shape[0]))
        step = StepMemory(self._config, self._embedding.index_select(0, padded.ids), capture)
        self.compute(padded, step, cache, len(self._layers))
        if capture is not None:
            _repeat_layers(capture, padded.raw_rows, self._config.hidden_size)
        return step.residual[: padded.raw_rows]

    @torch.inference_mode()
    def warm(self, max_rows: int, progress: Progress) -> None:
        """Go through every size up to max_rows once, which also starts the threads. progress is told sizes
        done and in all."""

        nothing = torch.empty(0, dtype=torch.int64)
        empty = ForwardBatch(nothing, nothing, nothing, (), nothing)
        sizes = [*SMALL_ROWS, *range(2 * ROW_STEP, padded_rows(max_rows) + 1, ROW_STEP)]
        scratch = KvCache.allocate(self._config, 1, torch.bfloat16)
        for done, rows in enumerate(sizes, start=1):
            padded = PaddedBatch.of(empty, rows)
            step = StepMemory(self._config, self._embedding.index_select(0, padded.ids))
            self.compute(padded, step, scratch, 1)
            progress(done, len(sizes))

    def compute(self, batch: PaddedBatch, step: StepMemory, cache: KvCache, layers: int) -> None:
        """The first layers over the batch's rows, padding rows included."""

        config = self._config
        first = self._kept_alive[0]
        norms = first.attention.head_norms
        shape = Shape(
            layers=layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=first.attention_norm.eps,
            head_eps=0.0 if norms is None else norms.query.eps,
            scale=config.head_dim**-0.5,
            threads=torch.get_num_threads(),
        )
        rows = Rows(
            rows=batch.rows,
            longest=int(batch.kv_lens.max()),
            positions=batch.positions.data_ptr(),
            write_slots=batch.write_slots.data_ptr(),
            key_starts=batch.key_starts.data_ptr(),
            key_slots=batch.key_slots.data_ptr(),
            cosine=self._rope.cos.data_ptr(),
            sine=self._rope.sin.data_ptr(),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            layer_stride=cache.keys.stride(0),
        )
        self._kernels.step(
            self._layers, ctypes.byref(shape), ctypes.byref(rows), ctypes.byref(step.described())
        )


class StepMemory:
    """One forward's activations, bfloat16.

    residual: [rows, hidden], what enters the first layer before the step and what leaves the last one after
    it. qkv: [rows, (heads + 2 · kv_heads) · head_dim], attended: [rows, heads · head_dim], active: [rows,
    inner], of the last layer computed; queries in qkv are rotated and scaled. capture: in memory of the
    caller's; the step writes a layer that is there more than once to its first place alone. Raises ValueError
    for captured rows without room.
    """

    def __init__(
        self, config: ModelConfig, residual: torch.Tensor, capture: CapturedRows | None = None
    ) -> None:
        rows = residual.shape[0]
        query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
        widest = max(config.hidden_size, config.intermediate_size, query)
        self.residual = residual
        self._normed = torch.empty_like(residual)
        self.qkv = residual.new_empty(rows, query + 2 * key)
        self.attended = residual.new_empty(rows, query)
        self.active = residual.new_empty(rows, config.intermediate_size)
        self._sums = torch.empty(rows, -(-widest // BLOCK_INPUTS))
        self._captured: torch.Tensor | None = None
        self._capture_at = (ctypes.c_int32 * config.layers)(*[-1] * config.layers)
        if capture is not None:
            capture.check(residual)
            self._captured = capture.rows
            for layer in capture.layers:
                self._capture_at[layer] = capture.layers.index(layer)

    def described(self) -> Memory:
        return Memory(
            residual=self.residual.data_ptr(),
            normed=self._normed.data_ptr(),
            qkv=self.qkv.data_ptr(),
            attended=self.attended.data_ptr(),
            active=self.active.data_ptr(),
            sums=self._sums.data_ptr(),
            captured=None if self._captured is None else self._captured.data_ptr(),
            capture_at=ctypes.addressof(self._capture_at),
            captures=0 if self._captured is None else self._captured.shape[1] // self.residual.shape[1],
        )


def _repeat_layers(capture: CapturedRows, rows: int, hidden: int) -> None:
    """The step knows one place for a layer; copy to the others."""
    places = capture.rows[:rows].view(rows, -1, hidden)
    for place, layer in enumerate(capture.layers):
        first = capture.layers.index(layer)
        if first != place:
            places[:, place] = places[:, first]


def _described(layer: DecoderLayer) -> Layer:
    norms = layer.attention.head_norms
    return Layer(
        attention_norm=_weight(layer.attention_norm),
        mlp_norm=_weight(layer.mlp_norm),
        query_norm=None if norms is None else _weight(norms.query),
        key_norm=None if norms is None else _weight(norms.key),
        qkv=_matrix(layer.attention.qkv),
        output=_matrix(layer.attention.output),
        gate_up=_matrix(layer.mlp.gate_up),
        down=_matrix(layer.mlp.down),
    )


def _weight(norm: RmsNorm) -> int:
    return norm.weight.data_ptr()


def _matrix(linear: Linear) -> Any:
    assert isinstance(linear, PackedMatrix)
    return linear.matrix
