"""N-gram lookup: propose what followed the last occurrence of the text's own last few tokens.

Prompt lookup decoding (Saxena, 2023) over prompt and output. No model, no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.draft.drafters.base import SharedState
from services.draft.work import Drafts, DraftWork, Tree

MAX_K = 32


@dataclass(slots=True)
class _Index:
    """after[ngram]: position behind its latest occurrence with a successor. indexed: ids taken in so far."""

    key: tuple[int, int]
    indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Chains of up to k tokens, copied from behind the longest n-gram that matches."""

    name = "ngram"
    kv_bytes_per_position = 0
    max_k = MAX_K
    capture: tuple[int, ...] = ()
    hidden_row_bytes = 0

    def __init__(self, vocab_size: int, tokenizer: str, *, longest_n: int = 4, shortest_n: int = 2) -> None:
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._sizes = range(longest_n, shortest_n - 1, -1)
        self._indexes: dict[int, _Index] = {}

    def attach(self, shared: SharedState) -> None:
        self._indexes.clear()

    def detach(self) -> None:
        self._indexes.clear()

    def draft(self, work: DraftWork) -> Drafts:
        for slot in work.released:
            self._indexes.pop(slot, None)
        trees = []
        for row in work.rows:
            index = self._indexes.get(row.slot)
            if index is None or index.key != row.key:
                index = self._indexes[row.slot] = _Index(row.key)
            self._take_in(index, row.ids)
            if drafted := self._lookup(index, row.ids, row.k):
                trees.append(Tree(row.slot, (row.ids[-1], *drafted), tuple(range(-1, len(drafted)))))
        return Drafts(tuple(trees))

    def _take_in(self, index: _Index, ids: Sequence[int]) -> None:
        for end in range(max(index.indexed, 1), len(ids)):
            for n in self._sizes:
                if n <= end:
                    index.after[tuple(ids[end - n : end])] = end
        index.indexed = len(ids)

    def _lookup(self, index: _Index, ids: Sequence[int], k: int) -> list[int]:
        for n in self._sizes:
            if n <= len(ids) and (start := index.after.get(tuple(ids[-n:]))) is not None:
                return _continued(ids, start, k)
        return []


def _continued(ids: Sequence[int], start: int, k: int) -> list[int]:
    """k ids from `start` on; behind the end of ids the copy reads what it has itself written."""
    drafted: list[int] = []
    for position in range(start, start + k):
        drafted.append(ids[position] if position < len(ids) else drafted[position - len(ids)])
    return drafted
