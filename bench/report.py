"""The outcome of a run as a Markdown table and as a plot (SVG, written here: bars need no library)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from bench.figures import Summary
from bench.prompts import GROUPS


def markdown(summaries: Sequence[Summary], missing: Mapping[str, str], baseline: str) -> str:
    """missing: server → why it was not measured."""
    lines = [
        f"| streams | server | tok/s | ratio to {baseline} | decode tok/s per stream | first token ms "
        "| rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in summaries:
        ratio = f"{one.ratio:.2f}" if one.ratio else "–"
        lines.append(
            f"| {one.streams} | {one.server} | {one.tokens_per_s:.1f} | {ratio} "
            f"| {one.decode_tokens_per_s:.1f} | {1e3 * one.first_token_s:.0f} | {one.rounds} |"
        )
    lines += [f"| | {server} | {why} | | | | |" for server, why in missing.items()]
    lines += ["", "One stream, by group of prompts (tok/s over whole answers):", ""]
    groups = [group for group in GROUPS if any(group in one.by_group for one in summaries)]
    lines += ["| server | " + " | ".join(groups) + " |", "|---" * (1 + len(groups)) + "|"]
    for one in summaries:
        if one.streams == 1:
            rates = [f"{one.by_group[group]:.1f}" if group in one.by_group else "–" for group in groups]
            lines.append(f"| {one.server} | " + " | ".join(rates) + " |")
    return "\n".join(lines) + "\n"


BAR_PX = 22
LABEL_PX = 250
PLOT_PX = 420
COLOURS = ("#4878a8", "#e08a3c", "#6aa06a", "#a06a9a")


def plot(summaries: Sequence[Summary]) -> str:
    """Horizontal bars of tokens per second, a colour for every number of streams."""
    most = max(one.tokens_per_s for one in summaries)
    streams = sorted({one.streams for one in summaries})
    bars = []
    for at, one in enumerate(summaries):
        y = 10 + at * BAR_PX
        width = PLOT_PX * one.tokens_per_s / most
        colour = COLOURS[streams.index(one.streams) % len(COLOURS)]
        label = escape(f"{one.server} · {one.streams} streams")
        bars.append(
            f'<text x="{LABEL_PX - 6}" y="{y + 14}" text-anchor="end">{label}</text>'
            f'<rect x="{LABEL_PX}" y="{y + 2}" width="{width:.1f}" height="{BAR_PX - 6}" fill="{colour}"/>'
            f'<text x="{LABEL_PX + width + 6:.1f}" y="{y + 14}">{one.tokens_per_s:.0f} tok/s</text>'
        )
    height = 20 + BAR_PX * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_PX + PLOT_PX + 100}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(bars) + "\n</svg>\n"
    )
