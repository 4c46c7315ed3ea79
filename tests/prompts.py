"""The questions in tests/data/prompts.jsonl."""

import json
from pathlib import Path

_PATH = Path(__file__).parent / "data" / "prompts.jsonl"
_BENCH_GROUP = {"translation", "summarization", "qa", "math_reasoning", "rag"}


def prompts(*, per_group: int, groups: set[str] | None = None) -> list[str]:
    """First turns of the first per_group questions of every group, or of the groups named. The eight small
    categories of MT-Bench are one group, mt_bench."""
    taken: dict[str, list[str]] = {}
    for line in _PATH.read_text().splitlines():
        row = json.loads(line)
        group = row["category"] if row["category"] in _BENCH_GROUP else "mt_bench"
        taken.setdefault(group, []).append(row["turns"][0])
    return [
        text
        for group, texts in taken.items()
        if groups is None or group in groups
        for text in texts[:per_group]
    ]
