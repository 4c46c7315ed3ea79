"""Names and shapes of the tensors that target and draft share; both sides plan with these functions."""

from __future__ import annotations

import torch

from common.kv.lengths import pages_for
from common.memory.arena import TensorSpec
from common.messages.lifecycle import Configure, ConfigureDraft
from common.messages.rounds import HIDDEN_BLOCKS

PAGE_TABLE = "page_table"
"""int32 [slots, pages per slot], by logical page; 0 where nothing is allocated. The draft reads."""
HIDDEN_ROWS = "hidden_rows"
"""bfloat16 [blocks, rows, states]: the target's hidden states, by the block of a round; a block has room for
the padding rows of a forward. The draft reads."""
HIDDEN_TAGS = "hidden_tags"
"""int64 [blocks]: the round whose rows a block holds, 0 while a forward writes and if it fails. The draft
reads."""
EMBEDDING = "embedding"
"""bfloat16 [ids, hidden size]: the target's embedding, which it reads there itself. The draft reads."""
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


def export_specs(configure: Configure) -> dict[str, TensorSpec]:
    return {
        PAGE_TABLE: page_table_spec(configure),
        TARGET_PATTERN: TensorSpec(torch.uint8, (PATTERN_BYTES,)),
    }


def hidden_specs(rows: int, row_bytes: int) -> dict[str, TensorSpec]:
    """rows: of a block, as many as a forward has, padding rows included."""
    states = row_bytes // torch.bfloat16.itemsize
    return {
        HIDDEN_ROWS: TensorSpec(torch.bfloat16, (HIDDEN_BLOCKS, rows, states)),
        HIDDEN_TAGS: TensorSpec(torch.int64, (HIDDEN_BLOCKS,)),
    }


def region_specs(kv_bytes: int) -> dict[str, TensorSpec]:
    """kv_bytes: 0 for a drafter without KV, which gets no such tensor."""
    specs = {DRAFT_PATTERN: TensorSpec(torch.uint8, (PATTERN_BYTES,))}
    if kv_bytes:
        specs[DRAFTER_KV] = TensorSpec(torch.uint8, (kv_bytes,))
    return specs
