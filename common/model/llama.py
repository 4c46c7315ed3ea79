"""The decoder of the Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2."""

from __future__ import annotations

import torch

from common.attention.kv_cache import KvCache
from common.model.batch import ForwardBatch
from common.model.config import ModelConfig
from common.model.layers import RmsNorm
from common.model.linear import Linear
from common.model.steps import CapturedRows, Steps


class LlamaModel:
    """embedding: [vocab, hidden], in dtype. steps: the decoder layers. max_positions: logical positions that
    their RoPE table has. weights: names format and kernels of the linear layers, for the numeric plan."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        max_positions: int,
        embedding: torch.Tensor,
        steps: Steps,
        final_norm: RmsNorm,
        lm_head: Linear,
        weights: str,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.max_positions = max_positions
        self.embedding = embedding
        self.steps = steps
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.weights = weights

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: KvCache, *, capture: CapturedRows | None = None
    ) -> torch.Tensor:
        """Writes the rows' KV into cache, and what is captured where capture says. Returns the logits asked
        for, float32 [len(logit_rows), vocab].

        capture: of layers 0 … layers − 1. Raises ValueError, before anything is written, for ids, positions
        or slots out of range, a cache of another shape, layers that do not exist, and captured rows without
        room.
        """

        self._check(batch, cache, () if capture is None else capture.layers)
        return self._logits(self.steps.run(batch, cache, capture), batch.logit_rows)

    @torch.inference_mode()
    def move_embedding(self, memory: torch.Tensor) -> None:
        """From now on the embedding is read in this memory, which holds the same numbers. What it was read in
        before is free if nobody else holds it."""
        if memory.shape != self.embedding.shape or memory.dtype != self.embedding.dtype:
            raise ValueError(
                f"embedding is {self.embedding.dtype} {list(self.embedding.shape)}, the memory is "
                f"{memory.dtype} {list(memory.shape)}"
            )
        self.embedding.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())

    def _logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.numel():
            return torch.empty(0, self.config.vocab_size)
        return self.lm_head(self.final_norm(x.index_select(0, rows))).float()

    def _check(self, batch: ForwardBatch, cache: KvCache, captured: tuple[int, ...]) -> None:
        config = self.config
        shape = (config.layers, cache.positions, config.kv_heads, config.head_dim)
        if tuple(cache.keys.shape) != shape or cache.keys.dtype != self.dtype:
            raise ValueError(
                f"KV cache is {cache.keys.dtype} {list(cache.keys.shape)}; this model needs {self.dtype}"
                f" {list(shape)}"
            )
        if not batch.ids.numel():
            raise ValueError("the batch has no rows")
        if not batch.ids.shape == batch.positions.shape == batch.write_slots.shape:
            raise ValueError(
                f"ids, positions and write_slots have shapes {list(batch.ids.shape)},"
                f" {list(batch.positions.shape)}"
                f" and {list(batch.write_slots.shape)}; they must be equal"
            )
        _check_range("id", batch.ids, config.vocab_size)
        _check_range("position", batch.positions, self.max_positions)
        _check_range("write slot", batch.write_slots, cache.positions)
        for segment in batch.segments:
            _check_range("key slot", segment.key_slots, cache.positions)
            _check_range("segment row", segment.rows, batch.ids.shape[0])
        for index in captured:
            if not 0 <= index < config.layers:
                raise ValueError(f"capture names layer {index}; the model has layers 0 … {config.layers - 1}")


def _check_range(name: str, values: torch.Tensor, limit: int) -> None:
    low, high = (int(value) for value in values.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} {low if low < 0 else high} is out of range; it must be in 0 … {limit - 1}")
