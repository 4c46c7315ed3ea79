"""The target model as the writer and the trainer use it: in this process, many sequences at once, with what
it computed at every position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.attention.kv_cache import KvCache
from common.attention.segments import build_batch
from common.graphs.padded import padded_rows
from common.model.llama import LlamaModel
from common.model.steps import CapturedRows


@dataclass(frozen=True, slots=True)
class Chunk:
    """ids at positions start, start + 1, … of the sequence on pages; their logits are not wanted."""

    pages: tuple[int, ...]
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LastToken:
    """The token at position base − 1, whose logits are wanted."""

    pages: tuple[int, ...]
    base: int
    tokens: Sequence[int]
    parents: tuple[int, ...] = (-1,)


class RecordingTarget:
    """Sequences on pages 1 … sequences, each as long as a page.

    layers: whose entering residual stream is recorded, in this order, before the final hidden state.
    """

    def __init__(self, model: LlamaModel, *, layers: tuple[int, ...], sequences: int, max_len: int) -> None:
        self.model = model
        self.layers = layers
        self.sequences = sequences
        self.max_len = max_len
        self._cache = KvCache.allocate(model.config, (sequences + 1) * max_len, model.dtype)

    @property
    def width(self) -> int:
        """Numbers recorded per position."""

        return (len(self.layers) + 1) * self.model.config.hidden_size

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk], lasts: Sequence[LastToken]) -> tuple[torch.Tensor, torch.Tensor]:
        """States of all rows, the chunks' first ([rows, width], in the model's dtype), and the last tokens'
        logits (float32 [lasts, vocab])."""

        batch = build_batch(chunks, lasts, self.max_len)
        count = batch.ids.shape[0]
        states = torch.empty(padded_rows(count), self.width, dtype=self.model.dtype)
        final = self.model.steps.run(batch, self._cache, CapturedRows(self.layers, states))
        states = states[:count]
        states[:, -self.model.config.hidden_size :] = final
        logits = torch.empty(0, self.model.config.vocab_size)
        if lasts:
            rows = final.index_select(0, batch.logit_rows)
            logits = self.model.lm_head(self.model.final_norm(rows)).float()
        return states, logits

    @torch.inference_mode()
    def choices(self, states: torch.Tensor) -> torch.Tensor:
        """int64 [rows]: the most likely next id behind each of the recorded states [rows, width]."""

        final = states[:, -self.model.config.hidden_size :]
        logits = self.model.lm_head(self.model.final_norm(final))
        return logits[:, : self.model.config.vocab_size].argmax(dim=-1)
