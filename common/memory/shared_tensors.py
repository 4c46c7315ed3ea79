"""Names and shapes of the tensors that target and draft share; both sides plan with these functions."""

from __future__ import annotations

import torch

from common.kv.lengths import pages_for
from common.memory.arena import TensorSpec
from common.messages.lifecycle import Configure, ConfigureDraft

PAGE_TABLE = "page_table"
"""int32 [slots, pages per slot], by logical page; 0 where nothing is allocated. The draft reads."""
HIDDEN_ROWS = "hidden_rows"
"""The target's hidden states by verify or prefill row, one block per parity. The draft reads."""
TARGET_PATTERN = "target_pattern"
"""uint8 [PATTERN_BYTES]: the target's half of the self-test. The draft reads."""
DRAFT_PATTERN = "draft_pattern"
"""uint8 [PATTERN_BYTES]: the draft's half of the self-test. The draft writes."""
DRAFTER_KV = "drafter_kv"
"""uint8 [pages × page_size × KV bytes per position]: the drafter's KV, by the target's page ids."""

PATTERN_BYTES = 4096


def page_table_spec(configure: Configure | ConfigureDraft) -> TensorSpec:
    width = pages_for(configure.max_model_len, configure.page_size)
    return TensorSpec(torch.int32, (configure.slots, width))


def export_specs(configure: Configure, hidden: TensorSpec) -> dict[str, TensorSpec]:
    return {
        PAGE_TABLE: page_table_spec(configure),
        HIDDEN_ROWS: hidden,
        TARGET_PATTERN: TensorSpec(torch.uint8, (PATTERN_BYTES,)),
    }


def region_specs(kv_bytes: int) -> dict[str, TensorSpec]:
    """kv_bytes: 0 for a drafter without KV, which gets no such tensor."""
    specs = {DRAFT_PATTERN: TensorSpec(torch.uint8, (PATTERN_BYTES,))}
    if kv_bytes:
        specs[DRAFTER_KV] = TensorSpec(torch.uint8, (kv_bytes,))
    return specs
