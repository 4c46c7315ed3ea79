"""A model's chat template: Jinja source that turns messages into the text that the model was trained on.

The environment is the one that templates are written for (Hugging Face transformers): trim_blocks,
lstrip_blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that keeps non-ASCII text, and the
`generation` block. It is Jinja's immutable sandbox: a template reaches nothing but its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """A compiled template.

    special_tokens: text of bos_token, eos_token and the like, as variables for the template.
    Raises ValueError when the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: object
    ) -> str:
        """The text of a conversation, special tokens written out: encode it with add_special=False.

        add_generation_prompt: end with the words that make the model answer. variables: what else the
        template may read, such as tools.

        Raises ValueError when the template refuses the messages or fails on them.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except TemplateError as error:
            raise ValueError(error.message or type(error).__name__) from error
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering writes its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
