"""Lookup hits first, a head's trees otherwise: row by row."""

from __future__ import annotations

from dataclasses import replace

from services.draft.drafters.base import SharedState
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.drafters.ngram import NgramDrafter
from services.draft.work import Drafts, DraftWork


class LookupFirst:
    """A slot whose text repeats itself is drafted for by lookup, which costs nothing; the head then only
    takes in what was committed."""

    def __init__(self, ngram: NgramDrafter, head: Eagle3Drafter) -> None:
        self.name = f"{head.name}+{ngram.name}"
        self.vocab_size = head.vocab_size
        self.tokenizer = head.tokenizer
        self.kv_bytes_per_position = head.kv_bytes_per_position
        self.max_k = min(head.max_k, ngram.max_k)
        self.capture = head.capture
        self.hidden_row_bytes = head.hidden_row_bytes
        self._ngram = ngram
        self._head = head

    def attach(self, shared: SharedState) -> None:
        self._ngram.attach(shared)
        self._head.attach(shared)

    def detach(self) -> None:
        self._ngram.detach()
        self._head.detach()

    def draft(self, work: DraftWork) -> Drafts:
        hits = self._ngram.draft(work).trees
        found = {tree.slot for tree in hits}
        rows = tuple(replace(row, k=0) if row.slot in found else row for row in work.rows)
        drafts = self._head.draft(replace(work, rows=rows))
        return Drafts((*hits, *drafts.trees), drafts.faults)
