"""Measured costs of a round, as functions that can be asked between and beyond what was measured."""

from __future__ import annotations

from bisect import bisect_left

OWN_RATE = 0.1
SHARED_RATE = 0.2
SETTLED_AFTER = 4
"""Measurements of a point before it moves the others."""


class CostCurve:
    """Cost, in µs, by an integer (rows of a forward, or k), from measurements that drift together.

    A measurement moves its own point, and, by SHARED_RATE, every point in proportion: a longer context or
    another process on the cores slows all of them, and points that were measured earlier stay comparable.
    Between points the curve is linear. Beyond them it goes on with growth: the cost of one more, as a share
    of the cost of the nearest point.
    """

    def __init__(self, growth: float) -> None:
        self._growth = growth
        self._points: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._order: list[int] = []

    @property
    def measured(self) -> bool:
        return bool(self._order)

    def observe(self, at: int, cost_us: float) -> None:
        cost_us = max(1.0, cost_us)
        expected = self._points.get(at)
        if expected is None:
            self._points[at] = cost_us
            self._counts[at] = 1
            self._order = sorted(self._points)
            return
        # One measurement may be anything (a page fault, a preempted core): it counts as at most double.
        ratio = min(max(cost_us / expected, 0.5), 2.0)
        count = self._counts[at] = self._counts[at] + 1
        if count <= SETTLED_AFTER:
            self._points[at] *= ratio ** (1.0 / count)
            return
        shared = ratio**SHARED_RATE
        for point in self._order:
            self._points[point] *= shared
        self._points[at] *= ratio**OWN_RATE

    def at(self, wanted: float) -> float:
        """Expected cost in µs. Needs a measurement."""
        order, points = self._order, self._points
        place = bisect_left(order, wanted)
        if place == len(order):
            last = order[-1]
            return points[last] * (1.0 + self._growth * (wanted - last))
        above = order[place]
        if place == 0:
            return points[above] / (1.0 + self._growth * (above - wanted))
        below = order[place - 1]
        share = (wanted - below) / (above - below)
        return points[below] + share * (points[above] - points[below])
