"""Grouped bars as SVG, written here: bars need no library."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

BAR_PX = 18
GAP_PX = 16
LABEL_PX = 130
PLOT_PX = 460
COLOURS = ("#9a9a9a", "#4878a8", "#e08a3c", "#6aa06a", "#a06a9a")


def grouped_bars(title: str, series: Mapping[str, Mapping[str, float]]) -> str:
    """Horizontal bars, one group for each key of the inner mappings, which are the same in all series; a
    colour for every series."""
    groups = list(next(iter(series.values())))
    most = max(value for values in series.values() for value in values.values())
    parts = [f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>']
    y = 34
    for number, name in enumerate(series):
        x = LABEL_PX + number * PLOT_PX // len(series)
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[number % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(name)}</text>')
    y += 26
    for group in groups:
        middle = y + BAR_PX * len(series) / 2 + 4
        parts.append(f'<text x="{LABEL_PX - 8}" y="{middle:.0f}" text-anchor="end">{escape(group)}</text>')
        for number, values in enumerate(series.values()):
            width = PLOT_PX * values[group] / most
            colour = COLOURS[number % len(COLOURS)]
            parts.append(
                f'<rect x="{LABEL_PX}" y="{y}" width="{width:.1f}" height="{BAR_PX - 3}" fill="{colour}"/>'
                f'<text x="{LABEL_PX + width + 5:.1f}" y="{y + 12}">{values[group]:.2f}</text>'
            )
            y += BAR_PX
        y += GAP_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL_PX + PLOT_PX + 60}" height="{y}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"
    )
