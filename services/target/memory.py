"""The memory that the target shares with a draft: what the draft reads, and the region that it writes."""

from __future__ import annotations

from pathlib import Path

import torch

from common.memory.arena import Arena, TensorSpec, manifest_of
from common.memory.handle import encode
from common.memory.selftest import has_pattern, write_pattern
from common.memory.shared_tensors import (
    DRAFT_PATTERN,
    PAGE_TABLE,
    TARGET_PATTERN,
    export_specs,
    region_specs,
)
from common.messages.lifecycle import Configure


class Exports:
    """What every draft may read, for one configuration: page table copy and hidden rows."""

    def __init__(self, configure: Configure, hidden: TensorSpec, directory: Path) -> None:
        self._directory = directory
        self._target = configure.target
        self._arena = Arena.create(
            service="target",
            incarnation=configure.target,
            label="exports",
            tensors=export_specs(configure, hidden),
            access="read",
            directory=directory,
        )
        self._positions = configure.pages * configure.page_size
        self._regions: dict[int, Arena] = {}

    def export_row(self, slot: int, pages: tuple[int, ...]) -> None:
        """The slot's row of the page table copy: pages by logical page, then zeros."""
        row = self._arena.tensors[PAGE_TABLE][slot]
        row[: len(pages)] = torch.tensor(pages, dtype=row.dtype)
        row[len(pages) :] = 0

    def allocate_region(self, draft: int, kv_bytes_per_position: int) -> bytes:
        """Memory for one draft, in place of any other's; the encoded manifest. Raises ArenaError."""
        self.free_regions()
        region = Arena.create(
            service="target",
            incarnation=self._target,
            label=f"draft_{draft:016x}",
            tensors=region_specs(self._positions * kv_bytes_per_position),
            access="write",
            directory=self._directory,
        )
        self._regions[draft] = region
        return encode(manifest_of(self._target, self._arena, region))

    def test_region(self, draft: int, nonce: int) -> bool:
        """Whether the draft's pattern(nonce) is there; writes pattern(nonce + 1) for it to read."""
        region = self._regions.get(draft)
        if region is None:
            return False
        write_pattern(self._arena.tensors[TARGET_PATTERN], nonce + 1)
        return has_pattern(region.tensors[DRAFT_PATTERN], nonce)

    def free_regions(self) -> None:
        while self._regions:
            _, region = self._regions.popitem()
            region.close()

    def close(self) -> None:
        self.free_regions()
        self._arena.close()
