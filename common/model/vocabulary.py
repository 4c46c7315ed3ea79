"""What a tokenizer is made of, whichever file it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

from common.model.chat_template import ChatTemplate

WORD_BORDER = "▁"
"""How SentencePiece vocabularies write a space."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """backend: splits text into ids.

    tokens: text by id as the file writes it; an id may be missing. pieces: the bytes that a token adds to the
    text. special_ids: control tokens, which are no part of the text. starts_with_space: encoding puts a space
    before the text, decoding drops one.
    """

    backend: tokenizers.Tokenizer
    tokens: Mapping[int, str]
    pieces: Mapping[int, bytes]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: ChatTemplate | None
    starts_with_space: bool = False


def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary, in which every byte is printable: Latin-1
    characters that print stand for themselves, the others for U+0100 and up in byte order (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = byte_level_alphabet()


def byte_level_piece(token: str) -> bytes:
    """The bytes of a byte-level token. One with characters outside the alphabet stands for its own text."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def sentencepiece_piece(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0xE4>` is one byte, U+2581 is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(WORD_BORDER, " ").encode("utf-8")
