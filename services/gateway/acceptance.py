"""Measured acceptance of drafts, by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.rounds import VerdictRow

WINDOW_ROWS = 128.0
"""Rows that an estimate remembers: a few hundred tokens of text, so that it follows a change of subject."""
KEPT_ROWS = 8.0
"""What is left of an estimate that got nothing new for long: a few new rows then decide."""
PRIOR_ROWS = 4.0
PRIOR_ACCEPTANCE = 0.5
GUESS_ROWS = 16.0
"""What is expected at a k by the shares of positions counts as so many rows that were measured at it."""


@dataclass(slots=True)
class _Share:
    """hits of `of`, older ones counting less. A hit may count for more or less than one."""

    hits: float
    of: float

    def observe(self, hit: float) -> None:
        keep = 1.0 - 1.0 / WINDOW_ROWS
        self.hits = keep * self.hits + hit
        self.of = keep * self.of + 1.0

    def age(self) -> None:
        """A round went by without news."""
        if self.of > KEPT_ROWS:
            keep = 1.0 - 1.0 / WINDOW_ROWS
            self.hits *= keep
            self.of *= keep

    @property
    def value(self) -> float:
        return self.hits / self.of


class Acceptance:
    """Two chains of shares by position 1 … max_k, each given the position before: how often a row that may
    have so many draft tokens has them, and how often a draft token whose parent was accepted is accepted.

    As conditional shares, what is measured at the first positions carries over to those that a smaller k
    does not reach. For trees that is a first guess only, as a smaller one is narrower too: what was accepted
    at a k itself counts more, the more of it there is.
    """

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self._tokens = [_Share(0.0, 0.0) for _ in range(max_k + 1)]
        self._drafted = [_Share(PRIOR_ROWS, PRIOR_ROWS) for _ in range(max_k)]
        self._accepted = [_Share(PRIOR_ROWS * PRIOR_ACCEPTANCE, PRIOR_ROWS) for _ in range(max_k)]

    def observe(self, k: int, rows: Sequence[VerdictRow]) -> None:
        """rows: those that were verified in a round that asked for k draft tokens each."""
        for row in rows:
            if k <= self.max_k:
                self._tokens[k].observe(row.accepted)
            for position in range(min(k, row.drafted + 1, self.max_k)):
                self._drafted[position].observe(row.drafted > position)
            for position in range(min(k, row.drafted, row.accepted + 1, self.max_k)):
                self._accepted[position].observe(row.accepted > position)

    def age(self) -> None:
        """A round that asked for no draft tokens."""
        for share in (*self._drafted, *self._accepted, *self._tokens):
            share.age()

    def expected(self) -> list[float]:
        """By k the draft tokens that a row may expect to be accepted."""
        guessed, tokens = 0.0, [0.0]
        for share, own in zip(self.accepted(), self._tokens[1:], strict=True):
            guessed += share
            tokens.append((GUESS_ROWS * guessed + own.hits) / (GUESS_ROWS + own.of))
        return tokens

    def drafted(self) -> list[float]:
        """At index i the expected share of rows with more than i draft tokens, if they may have them."""
        return _products([share.value for share in self._drafted])

    def accepted(self) -> list[float]:
        """At index i the expected share of rows of which more than i draft tokens are accepted."""
        both = zip(self._drafted, self._accepted, strict=True)
        return _products([drafted.value * accepted.value for drafted, accepted in both])


def _products(shares: Sequence[float]) -> list[float]:
    products = []
    product = 1.0
    for share in shares:
        product *= share
        products.append(product)
    return products
