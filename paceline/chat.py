"""`paceline chat`: a conversation in the terminal, accepted draft tokens in colour."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import PacelineError, RequestRefused
from paceline.generate import sampling
from paceline.render import DRAFT_COLOUR, PLAIN, Painter, summary, wants_colour
from paceline.sync import Client

HELP = "/reset starts afresh, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


class Conversation:
    """The messages so far, and one turn at a time."""

    def __init__(self, client: Client, out: Painter, system: str | None, params: dict[str, Any]) -> None:
        self._client = client
        self._out = out
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. Ctrl-C ends it and keeps what was said; a question whose answer
        fails before its first word is forgotten."""
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            with self._client.generate(messages=self.messages, **self._params) as stream:
                for chunk in stream:
                    answer.append(chunk.text)
                    self._out.chunk(chunk)
                self._out.note(f"\n{summary(stream.final)}")
        except KeyboardInterrupt:
            self._out.note("\nstopped")
        except PacelineError as error:
            self._out.note(f"\n{error}{_advice(error)}")
        if answer:
            self.messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            self.messages.pop()


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    colour = wants_colour(sys.stdout)
    out = Painter(sys.stdout, colour=colour)
    with Client(arguments.address) as client:
        model = client.model()
        print(f"{model.name}, drafter {model.drafter}. {HELP}.")
        if colour:
            print(f"Accepted draft tokens are in {DRAFT_COLOUR}this colour{PLAIN}.")
        conversation = Conversation(client, out, arguments.system, sampling(arguments))
        converse(conversation, out, input)
    return 0


def converse(conversation: Conversation, out: Painter, read: Callable[[str], str]) -> None:
    """Reads questions and commands until the end of the input."""
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            out.note("")
            return
        except KeyboardInterrupt:
            out.note(f"\n{HELP}")
            continue
        match line:
            case "":
                continue
            case "/quit":
                return
            case "/reset":
                conversation.reset()
            case command if command.startswith("/"):
                out.note(HELP)
            case question:
                conversation.ask(question)


def _advice(error: PacelineError) -> str:
    if isinstance(error, RequestRefused) and error.code == "context_length_exceeded":
        return " (/reset starts afresh)"
    return ""
