"""Which characters of an answer came from the draft."""

from __future__ import annotations

import codecs
from collections import deque
from itertools import groupby
from typing import Protocol

from services.gateway.engine import Chunk


class TokenTexts(Protocol):
    """What attribution needs of `common.model.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Attribution:
    """Follows one answer: a character belongs to the token that completed it.

    Decodes as `services.gateway.text.TextStream` does, so its characters are those of the text, which may
    come later (held back) or not at all (cut off at a stop string).
    """

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead: deque[tuple[int, bool]] = deque()

    def flags(self, chunk: Chunk) -> list[bool]:
        """For each character of the chunk's text, whether it is from the draft."""
        for token_id, from_draft in zip(chunk.token_ids, chunk.from_draft, strict=True):
            if not self._tokenizer.is_special(token_id):
                characters = len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
                self._ahead.append((characters, from_draft))
        flags: list[bool] = []
        missing = len(chunk.text)
        while missing and self._ahead:
            characters, from_draft = self._ahead.popleft()
            taken = min(characters, missing)
            flags += [from_draft] * taken
            missing -= taken
            if taken < characters:
                self._ahead.appendleft((characters - taken, from_draft))
        # The replacement character that ends a text in the middle of a character belongs to no token.
        return flags + [False] * missing


def spans(flags: list[bool]) -> list[int]:
    """Run lengths, in turn of False and True, starting with False."""
    lengths: list[int] = []
    for flag, run in groupby(flags):
        if flag and not lengths:
            lengths.append(0)
        lengths.append(sum(1 for _ in run))
    return lengths
