"""The memory that the target shares with a draft: what the draft reads, and the region that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.graphs.padded import padded_rows
from common.memory.arena import Arena, TensorSpec, manifest_of
from common.memory.handle import PeerAccess, encode
from common.memory.selftest import has_pattern, write_pattern
from common.memory.shared_tensors import (
    DRAFT_PATTERN,
    EMBEDDING,
    HIDDEN_ROWS,
    HIDDEN_TAGS,
    PAGE_TABLE,
    TARGET_PATTERN,
    export_specs,
    hidden_specs,
    region_specs,
)
from common.messages.lifecycle import Configure, JoinDraft
from common.model.llama import LlamaModel


class RegionRefused(ValueError):
    """A draft that wants what this target does not have; the message says what and what it has."""


@dataclass(frozen=True, slots=True)
class HiddenBlock:
    """Where a round's hidden rows go. rows: bfloat16 [rows of a padded forward, states]. tag: int64 [1]."""

    rows: torch.Tensor
    tag: torch.Tensor


class Exports:
    """What a draft may read, for one configuration: page table copy, and for one that reads the target's mind
    hidden rows and embedding. max_rows: of a forward."""

    def __init__(self, configure: Configure, model: LlamaModel, max_rows: int, directory: Path) -> None:
        self._model = model
        self._max_rows = max_rows
        self._directory = directory
        self._target = configure.target
        self._arena = self._create("exports", export_specs(configure), "read")
        self._positions = configure.pages * configure.page_size
        self._regions: dict[int, Arena] = {}
        self._hidden: dict[int, Arena] = {}
        self._embedding: Arena | None = None

    def export_row(self, slot: int, pages: tuple[int, ...]) -> None:
        """The slot's row of the page table copy: pages by logical page, then zeros."""
        row = self._arena.tensors[PAGE_TABLE][slot]
        row[: len(pages)] = torch.tensor(pages, dtype=row.dtype)
        row[len(pages) :] = 0

    def allocate_region(self, join: JoinDraft) -> bytes:
        """Memory for one draft, in place of any other's; the encoded manifest. Raises ArenaError,
        RegionRefused."""
        self.free_regions()
        draft = join.stamp.draft
        self._check_capture(join)
        arenas = [self._arena]
        if join.capture:
            self._hidden[draft] = self._create(
                f"rows_{draft:016x}",
                hidden_specs(padded_rows(self._max_rows), join.hidden_row_bytes),
                "read",
            )
            arenas += [self._hidden[draft], self._embedding_arena()]
        region_bytes = self._positions * join.kv_bytes_per_position
        self._regions[draft] = self._create(f"draft_{draft:016x}", region_specs(region_bytes), "write")
        return encode(manifest_of(self._target, *arenas, self._regions[draft]))

    def _create(self, label: str, tensors: dict[str, TensorSpec], access: PeerAccess) -> Arena:
        return Arena.create(
            service="target",
            incarnation=self._target,
            label=label,
            tensors=tensors,
            access=access,
            directory=self._directory,
        )

    def _check_capture(self, join: JoinDraft) -> None:
        config = self._model.config
        row_bytes = len(join.capture) * config.hidden_size * torch.bfloat16.itemsize
        if join.hidden_row_bytes != row_bytes:
            raise RegionRefused(
                f"the drafter reads hidden rows of {join.hidden_row_bytes} bytes from {len(join.capture)} "
                f"layers; this target's have {row_bytes}: give a head that was trained for this model"
            )
        for layer in join.capture:
            if not 0 <= layer < config.layers:
                raise RegionRefused(
                    f"the drafter reads the states entering layer {layer}; this target has layers 0 … "
                    f"{config.layers - 1}: give a head that was trained for this model"
                )

    def _embedding_arena(self) -> Arena:
        """The embedding, held once: the model reads it there from now on."""
        if self._embedding is None:
            embedding = self._model.embedding
            spec = TensorSpec(embedding.dtype, tuple(embedding.shape))
            self._embedding = self._create("embedding", {EMBEDDING: spec}, "read")
            self._embedding.tensors[EMBEDDING].copy_(embedding)
        return self._embedding

    @property
    def embedding(self) -> torch.Tensor | None:
        """Where the model is to read its embedding, once a draft reads it too."""
        return self._embedding.tensors[EMBEDDING] if self._embedding is not None else None

    def hidden_block(self, draft: int, block: int) -> HiddenBlock | None:
        """None if this draft has no hidden rows here."""
        arena = self._hidden.get(draft)
        if arena is None:
            return None
        return HiddenBlock(arena.tensors[HIDDEN_ROWS][block], arena.tensors[HIDDEN_TAGS][block : block + 1])

    def test_region(self, draft: int, nonce: int) -> bool:
        """Whether the draft's pattern(nonce) is there; writes pattern(nonce + 1) for it to read."""
        region = self._regions.get(draft)
        if region is None:
            return False
        write_pattern(self._arena.tensors[TARGET_PATTERN], nonce + 1)
        return has_pattern(region.tensors[DRAFT_PATTERN], nonce)

    def free_regions(self) -> None:
        for arenas in (self._regions, self._hidden):
            while arenas:
                _, arena = arenas.popitem()
                arena.close()

    def close(self) -> None:
        self.free_regions()
        if self._embedding is not None:
            self._embedding.close()
        self._arena.close()
