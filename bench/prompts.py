"""The prompts that every server is asked: first turns of Spec-Bench questions, by group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

PROMPTS_PATH = Path(__file__).parent / "prompts.jsonl"
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


@dataclass(frozen=True, slots=True)
class Prompt:
    question_id: int
    group: str
    text: str


class _Question(msgspec.Struct):
    question_id: int
    category: str
    turns: list[str]


def load_prompts(path: Path = PROMPTS_PATH) -> list[Prompt]:
    """path: questions in Spec-Bench's format, one JSON object a line. MT-Bench's eight small categories are
    one group."""
    prompts = []
    for line in path.read_bytes().splitlines():
        question = msgspec.json.decode(line, type=_Question)
        group = question.category if question.category in GROUPS else "mt_bench"
        prompts.append(Prompt(question.question_id, group, question.turns[0]))
    return prompts


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """count prompts, taken from the groups in turn, so that few prompts still stand for all groups."""
    by_group = {group: [one for one in prompts if one.group == group] for group in GROUPS}
    longest = max(len(ones) for ones in by_group.values())
    in_turn = [ones[at] for at in range(longest) for ones in by_group.values() if at < len(ones)]
    return in_turn[:count]
