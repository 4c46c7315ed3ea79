"""The target's memory as the draft maps it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from common.kv.lengths import pages_for
from common.memory.arena import TensorSpec
from common.memory.attach import attach
from common.memory.handle import HandleError, decode
from common.memory.selftest import has_pattern, write_pattern
from common.memory.shared_tensors import (
    DRAFT_PATTERN,
    DRAFTER_KV,
    EMBEDDING,
    HIDDEN_ROWS,
    HIDDEN_TAGS,
    PAGE_TABLE,
    PATTERN_BYTES,
    TARGET_PATTERN,
    page_table_spec,
    region_specs,
)
from common.messages.lifecycle import ConfigureDraft
from common.messages.rounds import HIDDEN_BLOCKS, ProposeRow
from services.draft.drafters.base import Drafter, HiddenStates, SharedState


class Mapped:
    """One attachment. Raises HandleError for a manifest or a segment that does not fit the configuration."""

    def __init__(self, configure: ConfigureDraft, drafter: Drafter, directory: Path) -> None:
        kv_bytes = configure.pages * configure.page_size * drafter.kv_bytes_per_position
        pattern = TensorSpec(torch.uint8, (PATTERN_BYTES,))
        self._attachment = attach(
            decode(configure.manifest),
            {
                PAGE_TABLE: page_table_spec(configure),
                TARGET_PATTERN: pattern,
                **region_specs(kv_bytes),
            },
            directory=directory,
        )
        tensors = self._attachment.tensors
        try:
            hidden = _hidden_states(tensors, drafter) if drafter.capture else None
        except HandleError:
            self._attachment.detach()
            raise
        self.shared = SharedState(
            page_table=tensors[PAGE_TABLE],
            kv=tensors.get(DRAFTER_KV, torch.empty(0, dtype=torch.uint8)),
            hidden=hidden,
            pages=configure.pages,
            page_size=configure.page_size,
            max_model_len=configure.max_model_len,
            max_nodes=configure.max_nodes,
        )

    def write_pattern(self, nonce: int) -> None:
        write_pattern(self._attachment.tensors[DRAFT_PATTERN], nonce)

    def has_pattern(self, nonce: int) -> bool:
        return has_pattern(self._attachment.tensors[TARGET_PATTERN], nonce)

    def page_table_fault(self, row: ProposeRow) -> str | None:
        """How the exported page table contradicts what the gateway says of a slot, or None."""
        shared = self.shared
        pages = shared.page_table[row.slot].tolist()
        told = pages_for(row.allocated, shared.page_size)
        held = next((place for place, page in enumerate(pages) if page == 0), len(pages))
        if held < told:
            return f"slot {row.slot} has {held} pages in the table, the messages allocate {told}"
        if any(not 0 < page < shared.pages for page in pages[:held]) or len(set(pages[:held])) != held:
            return f"slot {row.slot} has pages out of range or twice: {pages[:held]}"
        return None

    def detach(self) -> None:
        self._attachment.detach()


def _hidden_states(tensors: Mapping[str, torch.Tensor], drafter: Drafter) -> HiddenStates:
    """Raises HandleError for rows or an embedding that this drafter cannot read."""
    states = drafter.hidden_row_bytes // torch.bfloat16.itemsize
    shapes = {
        HIDDEN_ROWS: (torch.bfloat16, (HIDDEN_BLOCKS, None, states)),
        HIDDEN_TAGS: (torch.int64, (HIDDEN_BLOCKS,)),
        EMBEDDING: (torch.bfloat16, (None, states // len(drafter.capture))),
    }
    for name, (dtype, shape) in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise HandleError(f"tensor {name!r} is expected and not in the manifest")
        fits = len(shape) == tensor.dim() and all(
            size in (None, real) for size, real in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not fits:
            raise HandleError(
                f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
            )
    embedding = tensors[EMBEDDING]
    if embedding.shape[0] < drafter.vocab_size:
        raise HandleError(
            f"tensor {EMBEDDING!r} has {embedding.shape[0]} ids, "
            f"the drafter's vocabulary {drafter.vocab_size}"
        )
    return HiddenStates(tensors[HIDDEN_ROWS], tensors[HIDDEN_TAGS], embedding)
