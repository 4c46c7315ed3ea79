"""What every drafter offers to the draft service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.draft.work import Drafts, DraftWork


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The target's mind, read-only. rows: bf16 [blocks, rows, states]. tags: int64 [blocks], the round whose
    rows a block holds. embedding: bf16 [ids, hidden size]."""

    rows: torch.Tensor
    tags: torch.Tensor
    embedding: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedState:
    """The target's memory as the draft sees it.

    page_table: int32 [slots, pages per slot], read-only. kv: uint8 [bytes], the drafter's KV region,
    writable; empty for a drafter without KV. hidden: None for a drafter that reads none.
    """

    page_table: torch.Tensor
    kv: torch.Tensor
    hidden: HiddenStates | None
    pages: int
    page_size: int
    max_model_len: int
    max_nodes: int


class Drafter(Protocol):
    """Proposes token trees. Runs on the draft's device thread alone.

    vocab_size and tokenizer (fingerprint) must agree with the target's; a drafter that works on any ids
    takes them from the served model's tokenizer. capture: the target's layers whose entering residual stream
    it reads, side by side in rows of hidden_row_bytes; empty and 0 for none.
    """

    name: str
    vocab_size: int
    tokenizer: str
    kv_bytes_per_position: int
    max_k: int
    capture: tuple[int, ...]
    hidden_row_bytes: int

    def attach(self, shared: SharedState) -> None:
        """Drop all state and work on this memory from now on."""
        ...

    def detach(self) -> None:
        """Drop all state and every reference to shared memory."""
        ...

    def draft(self, work: DraftWork) -> Drafts:
        """One tree per row that has something to propose; rows left out propose nothing."""
        ...
