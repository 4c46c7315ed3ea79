"""Text to token ids and back, from a Hugging Face directory or from the metadata of a GGUF file."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.model.tokenizer_gguf import read_gguf
from common.model.tokenizer_hf import read_directory
from common.model.vocabulary import TokenizerParts


class Tokenizer:
    """vocab_size: highest id + 1; a model's logits may be wider. eos_ids: ids that end an answer.
    fingerprint: see the function of that name. chat_template: None when the model has none."""

    def __init__(self, parts: TokenizerParts) -> None:
        parts.backend.no_truncation()
        parts.backend.no_padding()
        self._backend = parts.backend
        self._special_ids = parts.special_ids
        self._starts_with_space = parts.starts_with_space
        self.vocab_size = max(parts.tokens, default=-1) + 1
        self._pieces = [parts.pieces.get(token_id, b"") for token_id in range(self.vocab_size)]
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.fingerprint = fingerprint(parts.tokens)

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Token ids. Special tokens written out in the text become their ids; bytes without a token in the
        vocabulary are dropped.

        add_special: put what the model expects at the start, usually BOS; one that the text has already is
        not doubled. A rendered chat template has everything written out: pass False.
        """
        # As a batch, because `encode` keeps every other thread from the interpreter until it is done.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoded.ids
        if add_special and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out. Bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._starts_with_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; for a special token its name, for an unknown id none.

        One token need not be whole characters.
        """
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """A control token: parsed in prompts, no part of generated text."""
        return token_id in self._special_ids


def fingerprint(tokens: Mapping[int, str]) -> str:
    """sha256, in hex, over (id, token) in id order: equal for one vocabulary in whatever file it travels."""
    digest = hashlib.sha256()
    for token_id in sorted(tokens):
        token = tokens[token_id].encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<II", token_id, len(token)) + token)
    return digest.hexdigest()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model. path: a Hugging Face directory or a GGUF file.

    Raises ValueError for what is missing, damaged or of a kind that is not supported, by name.
    """
    if path.is_dir():
        return Tokenizer(read_directory(path))
    if path.is_file():
        return Tokenizer(read_gguf(path))
    raise ValueError(f"no tokenizer at {path}: neither a directory nor a file")
