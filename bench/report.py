"""The outcome of a run as a Markdown table and as a plot (SVG, written here: bars need no library)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from bench.figures import Figures, Rates, Summary, ratios
from bench.prompts import GROUPS

OWN = "paceline"
"""How the names of Paceline's own servers begin."""


def markdown(
    figures: Sequence[Figures], summaries: Sequence[Summary], missing: Mapping[str, str], baseline: str
) -> str:
    """missing: server → why it was not measured."""
    lines = [
        f"× is the ratio to `{baseline}` in the same round; every figure is a median over rounds.",
        "",
        "| streams | server | tok/s | × | decode tok/s per stream | × | first token ms | × | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in summaries:
        rates, to = one.rates, one.ratios
        cells = [
            f"{rates.tokens_per_s:.1f}",
            f"{to.tokens_per_s:.2f}" if to else "–",
            f"{rates.decode_tokens_per_s:.1f}",
            f"{to.decode_tokens_per_s:.2f}" if to else "–",
            f"{1e3 * rates.first_token_s:.0f}",
            f"{to.first_token_s:.2f}" if to else "–",
            str(one.rounds),
        ]
        lines.append(f"| {one.streams} | {one.server} | " + " | ".join(cells) + " |")
    lines += [f"| | {server} | {why} | | | | | | |" for server, why in missing.items()]
    return "\n".join([*lines, *_versus(figures, summaries), *_by_group(summaries)]) + "\n"


def _versus(figures: Sequence[Figures], summaries: Sequence[Summary]) -> list[str]:
    """Paceline's servers over every other one."""
    own = [one for one in summaries if one.server.startswith(OWN)]
    others = list(dict.fromkeys(one.server for one in summaries if not one.server.startswith(OWN)))
    if not own or not others:
        return []
    lines = [
        "",
        "Paceline over the others: tok/s · decode tok/s per stream · first token (less is better)",
        "",
    ]
    lines += ["| streams | | " + " | ".join(others) + " |", "|---" * (2 + len(others)) + "|"]
    for one in own:
        cells = [_cell(ratios(figures, one.streams, one.server, other)) for other in others]
        lines.append(f"| {one.streams} | {one.server} | " + " | ".join(cells) + " |")
    return lines


def _cell(to: Rates | None) -> str:
    if to is None:
        return "–"
    return f"{to.tokens_per_s:.2f} · {to.decode_tokens_per_s:.2f} · {to.first_token_s:.2f}"


def _by_group(summaries: Sequence[Summary]) -> list[str]:
    groups = [group for group in GROUPS if any(group in one.by_group for one in summaries)]
    if not groups:
        return []
    lines = ["", "One stream, by group of prompts (tok/s over whole answers):", ""]
    lines += ["| server | " + " | ".join(groups) + " |", "|---" * (1 + len(groups)) + "|"]
    for one in summaries:
        if one.streams == 1:
            rates = [f"{one.by_group[group]:.1f}" if group in one.by_group else "–" for group in groups]
            lines.append(f"| {one.server} | " + " | ".join(rates) + " |")
    return lines


BAR_PX = 22
LABEL_PX = 250
PLOT_PX = 420
COLOURS = ("#4878a8", "#e08a3c", "#6aa06a", "#a06a9a")


def plot(summaries: Sequence[Summary]) -> str:
    """Horizontal bars of tokens per second, a colour for every number of streams."""
    most = max(one.rates.tokens_per_s for one in summaries)
    streams = sorted({one.streams for one in summaries})
    bars = []
    for at, one in enumerate(summaries):
        y = 10 + at * BAR_PX
        rate = one.rates.tokens_per_s
        width = PLOT_PX * rate / most
        colour = COLOURS[streams.index(one.streams) % len(COLOURS)]
        label = escape(f"{one.server} · {one.streams} streams")
        bars.append(
            f'<text x="{LABEL_PX - 6}" y="{y + 14}" text-anchor="end">{label}</text>'
            f'<rect x="{LABEL_PX}" y="{y + 2}" width="{width:.1f}" height="{BAR_PX - 6}" fill="{colour}"/>'
            f'<text x="{LABEL_PX + width + 6:.1f}" y="{y + 14}">{rate:.0f} tok/s</text>'
        )
    height = 20 + BAR_PX * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_PX + PLOT_PX + 100}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(bars) + "\n</svg>\n"
    )
