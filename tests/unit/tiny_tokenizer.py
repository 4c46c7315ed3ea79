"""A tokenizer whose ids are UTF-8 bytes, for tests that need no real vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BOS_ID, EOS_ID, VOCAB_SIZE = 256, 257, 258


class TinyTemplate:
    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("a conversation starts with the user")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


class TinyTokenizer:
    vocab_size = VOCAB_SIZE
    bos_id = BOS_ID
    eos_ids = (EOS_ID,)

    def __init__(self, chat_template: TinyTemplate | None = None) -> None:
        self.chat_template = chat_template or TinyTemplate()

    def encode(self, text: str, add_special: bool) -> list[int]:
        """add_special prepends nothing to an empty text, so that an empty prompt stays empty."""
        ids = list(text.encode())
        return [BOS_ID, *ids] if add_special and ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
