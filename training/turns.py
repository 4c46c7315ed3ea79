"""Which user turns and answers are worth training on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MIN_TURN_CHARS = 12
MIN_ANSWER_TOKENS = 8
LONGEST_PERIOD = 24
REPEATS = 3
SHORTEST_LOOP = 10
"""An answer ends that says the same up to LONGEST_PERIOD tokens REPEATS times in a row, in at least so many
tokens."""


class TurnFilter:
    """Lets every user turn pass once. forbidden: turns that never pass."""

    def __init__(self, forbidden: Iterable[str]) -> None:
        self._seen = {normalised(turn) for turn in forbidden}

    def passes(self, turn: str) -> bool:
        key = normalised(turn)
        if len(turn.strip()) < MIN_TURN_CHARS or "\ufffd" in turn or key in self._seen or is_monotonous(turn):
            return False
        self._seen.add(key)
        return True


def normalised(turn: str) -> str:
    """Equal for turns that differ in case, spaces and punctuation only."""

    return " ".join(re.findall(r"\w+", turn.lower()))


def is_monotonous(text: str) -> bool:
    """Fewer than a third of its words are different ones."""

    words = re.findall(r"\w+", text.lower())
    return len(words) >= 20 and len(set(words)) * 3 < len(words)


def repeats_itself(ids: Sequence[int]) -> bool:
    """The end is the same piece over and over."""

    for period in range(1, LONGEST_PERIOD + 1):
        length = max(SHORTEST_LOOP, period * REPEATS)
        if len(ids) >= length and all(ids[-at] == ids[-at - period] for at in range(1, length - period + 1)):
            return True
    return False


def read_prompts(path: Path) -> list[str]:
    """The first turn of every line: a JSON string, or an object with `prompt` or `turns`. Raises ValueError
    naming the line."""

    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt = value if isinstance(value, str) else value.get("prompt") or value["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            prompt = None
        if not isinstance(prompt, str):
            raise ValueError(
                f'{path}:{number}: expected a JSON string, {{"prompt": …}} or {{"turns": […]}}, found'
                f" {line[:60]!r}"
            )
        prompts.append(prompt)
    return prompts


def read_all_turns(path: Path) -> list[str]:
    """Every turn of a file of prompts, later turns of a conversation too."""

    turns = read_prompts(path)
    for line in path.read_text(encoding="utf-8").splitlines():
        value = json.loads(line) if line.strip() else None
        if isinstance(value, dict):
            turns.extend(turn for turn in (value.get("turns") or [])[1:] if isinstance(turn, str))
    return turns
