"""A run's loss and held-out acceptance over its steps, as SVG written here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, GAP = 420, 240, 60, 30, 90
COLOURS = ("#4878a8", "#e08a3c", "#6aa06a", "#a06a9a", "#888888")

Line = Sequence[tuple[float, float]]


def plot_run(metrics: Path, target: Path) -> None:
    """metrics: a run's metrics.jsonl."""

    notes = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [(note["step"], note["loss"]) for note in notes if "loss" in note]
    reaches = [note for note in notes if "reach" in note]
    depth = max((len(note["reach"]) for note in reaches), default=0)
    by_position = {
        f"first {at + 1}" if at else "first": [(note["step"], note["reach"][at]) for note in reaches]
        for at in range(depth)
    }
    target.write_text(svg({"loss": {"loss": losses}, "held-out acceptance": by_position}), encoding="utf-8")


def svg(panels: Mapping[str, Mapping[str, Line]]) -> str:
    """Panels side by side: title → legend → points."""

    drawn = [
        _panel(title, lines, LEFT + at * (WIDTH + GAP)) for at, (title, lines) in enumerate(panels.items())
    ]
    width = LEFT + len(panels) * (WIDTH + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + TOP + 50}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _panel(title: str, lines: Mapping[str, Line], left: int) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return f'<text x="{left}" y="{TOP - 10}">{title}: nothing measured</text>'
    most_x = max(x for x, _ in points) or 1.0
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points) or 1.0
    parts: list[Any] = [
        f'<text x="{left}" y="{TOP - 10}">{title}</text>',
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + HEIGHT * (1 - share)
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{low + share * (high - low):.2f}</text>'
        )
        x = left + WIDTH * share
        parts.append(
            f'<text x="{x:.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{share * most_x:.0f}</text>'
        )
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{left + WIDTH * x / most_x:.1f},{TOP + HEIGHT * (1 - (y - low) / (high - low)):.1f}"
            for x, y in line
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{left + WIDTH - 6}" y="{TOP + 16 + 15 * number}" text-anchor="end" '
            f'fill="{colour}">{name}</text>'
        )
    parts.append(
        f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">training step</text>'
    )
    return "\n".join(parts)
