"""From token ids to the text of an answer: whole characters, no special tokens, stop conditions.

The text and the token that ends it depend on the ids alone, not on how they arrive: every rule is applied
as if characters came one at a time.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class TokenTexts(Protocol):
    """What a text stream needs of `common.model.tokenizer.Tokenizer`."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an answer ended. stop_reason: the stop string or stop token id that matched, None for EOS."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


class TextStream:
    """One answer's text. Push committed ids in order, take text that later ids cannot change.

    stop: strings that end the text, none empty; the one whose last character comes first wins, the longest
    of those that end there, and it is cut off. stop_token_ids, eos_ids: ids that end the answer and are no
    part of the text. ignore_eos: go on past EOS. max_tokens: ids that may be pushed; one that is also a stop
    ends with reason stop.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        *,
        stop: Sequence[str],
        stop_token_ids: Collection[int],
        eos_ids: Collection[int],
        ignore_eos: bool,
        max_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._eos_ids = frozenset() if ignore_eos else frozenset(eos_ids)
        self._tokens_left = max_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._safe: list[str] = []
        self._held = ""
        self._finished: FinishReason | None = None
        self._closed = False

    def push(self, token_id: int) -> FinishReason | None:
        """Adds one id; the reason if the answer ends with it. Raises RuntimeError after the end."""
        if self._closed:
            raise RuntimeError(f"token {token_id} came after the end of the text")
        self._tokens_left -= 1
        if token_id in self._eos_ids:
            return self._close(FinishReason("stop"))
        if token_id in self._stop_token_ids:
            return self._close(FinishReason("stop", token_id))
        if not self._tokenizer.is_special(token_id):
            matched = self._append(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
            if matched is not None:
                return matched
        if self._tokens_left <= 0:
            return self._close(FinishReason("length"))
        return None

    def take(self) -> str:
        """Text that is safe to send and was not taken yet."""
        text = "".join(self._safe)
        self._safe.clear()
        return text

    def finish(self) -> None:
        """Ends the text from outside, as for an aborted request: held text becomes safe. Idempotent."""
        if not self._closed:
            self._close(None)

    def _close(self, finish: FinishReason | None) -> FinishReason | None:
        """Half a character at the end becomes U+FFFD, which may in turn end a stop string."""
        matched = self._append(self._utf8.decode(b"", final=True))
        if matched is not None:
            return matched
        self._safe.append(self._held)
        self._held = ""
        self._closed = True
        return finish

    def _append(self, text: str) -> FinishReason | None:
        if not text:
            return None
        text = self._held + text
        match = self._first_stop(text)
        if match is not None:
            start, string = match
            self._safe.append(text[:start])
            self._held = ""
            self._closed = True
            return FinishReason("stop", string)
        held = self._held_back(text)
        self._safe.append(text[: len(text) - held])
        self._held = text[len(text) - held :]
        return None

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Start of the stop string that ends first; of several that end there, the longest."""
        found = [
            (start + len(string), start, string) for string in self._stop if (start := text.find(string)) >= 0
        ]
        if not found:
            return None
        _, start, string = min(found)
        return start, string

    def _held_back(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._stop):
                return length
        return 0
