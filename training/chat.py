"""A model's chat format around user turns that it writes itself."""

from __future__ import annotations

from common.model.tokenizer import Tokenizer

MARK = "\N{WORD JOINER}turn\N{WORD JOINER}"


class ChatFormat:
    """Raises ValueError for a model without a chat template, or one that does not show the user's text as it
    is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template, so it cannot write user turns: give --prompts")
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        rendered = self._render(MARK)
        if rendered.count(MARK) != 1:
            raise ValueError("the model's chat template does not show the user's text as it is")
        self._before = rendered.partition(MARK)[0]

    def bare_turn(self, lead: str) -> list[int]:
        """Ids up to where the user's text goes on behind `lead`."""

        return self._tokenizer.encode(self._before + lead, add_special=False)

    def prompt(self, turn: str) -> list[int]:
        """Ids up to where the answer begins."""

        return self._tokenizer.encode(self._render(turn), add_special=False)

    def _render(self, turn: str) -> str:
        return self._template.render([{"role": "user", "content": turn}], add_generation_prompt=True)
