"""k by measurement: the number of draft tokens that commits the most tokens per second."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.messages.rounds import Verdict
from services.gateway.acceptance import Acceptance
from services.gateway.k_costs import CostCurve
from services.gateway.options import KBelief, RoundSample

ROW_GROWTH = 0.03
"""What another row of a forward is taken to cost before it was measured, as a share of the forward."""
WAIT_GROWTH = 0.1
"""The same of one more draft token in the time that a round spends outside the target's forward."""
MARGIN = 0.05
"""Another k must promise so much more than the present one: above what two estimates of equal k differ by."""
FIRST_ROWS = 16
"""Draft tokens of all slots together that a batch size begins with: rows cost before it is known how much."""
REVIEW_ROUNDS = 8
"""Rounds between two reviews of k."""
CONFIRMATIONS = 2
"""Reviews in a row that must find a better k before one is taken."""
PROBE_ROUNDS = 8
FIRST_PROBE_AFTER = 48
LAST_PROBE_AFTER = 768
"""Rounds between probes of other k: doubled after each that told nothing new."""
NEWS = 0.1
"""A probe told something when the promise of its k, against the present one, rose by so much."""


@dataclass(slots=True)
class _Batch:
    """What is known and chosen for rounds with about so many verify rows.

    forward: cost by rows of the forward. wait: time of a round outside the forward, by k. probe: the k that
    is tried for probe_left rounds, after promising `promise` times the tokens of the present one. probed_at:
    round of the last probe of each k.
    """

    k: int
    forward: CostCurve = field(default_factory=lambda: CostCurve(ROW_GROWTH))
    wait: CostCurve = field(default_factory=lambda: CostCurve(WAIT_GROWTH))
    rounds: int = 0
    confirmed: int = 0
    probe: int = 0
    promise: float = 0.0
    probe_left: int = 0
    probe_after: int = FIRST_PROBE_AFTER
    next_probe: int = FIRST_PROBE_AFTER
    probed_at: dict[int, int] = field(default_factory=dict)


class AdaptiveK:
    """Maximises expected committed tokens per second over k = 0 … max_k.

    Costs and the choice are kept for each batch size (in powers of two); acceptance is shared. Deterministic:
    the same verdicts give the same choices.
    """

    def __init__(self, max_k: int, first_k: int) -> None:
        self.max_k = max_k
        self._first_k = min(first_k, max_k)
        self._acceptance = Acceptance(max_k)
        self._batches: dict[int, _Batch] = {}
        self._latest = 1
        self._asked_before: dict[int, int] = {}

    def choose(self, verify_rows: int) -> int:
        if verify_rows < 1:
            return 0
        batch = self._batch(verify_rows)
        return batch.probe if batch.probe_left else batch.k

    def observe(self, verdict: Verdict, sample: RoundSample) -> None:
        rows = [row for row in verdict.rows if row.status == "ok"]
        if not rows or len(rows) != sample.verify_rows:
            return
        if sample.k and verdict.draft in ("used", "empty"):
            self._acceptance.observe(sample.k, rows)
        elif not sample.k:
            self._acceptance.age()
        batch = self._batch(len(rows))
        # A draft that was asked for another k before has not run ahead for this one: an untypical wait.
        settled = sample.k == self._asked_before.get(verdict.group)
        self._asked_before[verdict.group] = sample.k
        if settled and not sample.chunk_rows:
            batch.forward.observe(len(rows) + sum(row.drafted for row in rows), verdict.elapsed_us)
            batch.wait.observe(sample.k, 1e6 * sample.wall_s - verdict.elapsed_us)
        batch.rounds += 1
        self._latest = len(rows)
        self._advance(batch, len(rows))

    def belief(self) -> KBelief:
        batch = self._batch(self._latest)
        accepted = tuple(self._acceptance.accepted())
        if not (batch.forward.measured and batch.wait.measured):
            return KBelief(batch.k, accepted, (), ())
        costs_us = [self._round_us(batch, self._latest, k) for k in range(self.max_k + 1)]
        rates = self._rates(batch, self._latest)
        return KBelief(batch.k, accepted, tuple(cost * 1e-6 for cost in costs_us), tuple(rates))

    def _batch(self, verify_rows: int) -> _Batch:
        size = 1 << (verify_rows - 1).bit_length()
        if size not in self._batches:
            nearest = min(self._batches, key=lambda known: abs(known - size), default=0)
            first = self._batches[nearest].k if nearest else self._first_k
            self._batches[size] = _Batch(min(first, max(1, FIRST_ROWS // size)))
        return self._batches[size]

    def _round_us(self, batch: _Batch, verify_rows: int, k: int) -> float:
        """Expected wall time. Slots are taken to have all as many draft tokens: exact for one slot, and for
        more where the cost of a row is constant."""
        forward_us = 0.0
        drafted = [1.0, *self._acceptance.drafted()[:k], 0.0]
        for nodes in range(k + 1):
            share = drafted[nodes] - drafted[nodes + 1]
            forward_us += share * batch.forward.at(verify_rows * (1 + nodes))
        return forward_us + batch.wait.at(k)

    def _rates(self, batch: _Batch, verify_rows: int) -> list[float]:
        """Expected committed tokens per second by k."""
        return [
            1e6 * verify_rows * (1.0 + accepted) / self._round_us(batch, verify_rows, k)
            for k, accepted in enumerate(self._acceptance.expected())
        ]

    def _advance(self, batch: _Batch, verify_rows: int) -> None:
        if batch.probe_left:
            batch.probe_left -= 1
            if not batch.probe_left:
                self._end_probe(batch, verify_rows)
        elif batch.rounds >= batch.next_probe and batch.forward.measured:
            self._begin_probe(batch, verify_rows)
        elif batch.rounds % REVIEW_ROUNDS == 0:
            self._review(batch, verify_rows)

    def _review(self, batch: _Batch, verify_rows: int) -> None:
        """Take a k that has promised MARGIN more than the present one often enough in a row."""
        if not (batch.forward.measured and batch.wait.measured):
            return
        rates = self._rates(batch, verify_rows)
        best = max(range(self.max_k + 1), key=rates.__getitem__)
        if rates[best] <= (1.0 + MARGIN) * rates[batch.k]:
            batch.confirmed = 0
            return
        batch.confirmed += 1
        if batch.confirmed >= CONFIRMATIONS:
            batch.k = best
            batch.confirmed = 0
            batch.probe_after = FIRST_PROBE_AFTER
            batch.next_probe = batch.rounds + batch.probe_after

    def _begin_probe(self, batch: _Batch, verify_rows: int) -> None:
        """Try the k, of those that would tell something, that was tried longest ago: none, the neighbours,
        up to twice as many, and the best of those that draft."""
        rates = self._rates(batch, verify_rows)
        candidates = {0, batch.k - 1, batch.k + 1, min(2 * batch.k, self.max_k)}
        candidates.add(max(range(1, self.max_k + 1), key=rates.__getitem__))
        candidates = {k for k in candidates if 0 <= k <= self.max_k and k != batch.k}
        batch.probe = min(candidates, key=lambda k: (batch.probed_at.get(k, -1), -rates[k]))
        batch.probed_at[batch.probe] = batch.rounds
        batch.probe_left = PROBE_ROUNDS
        batch.promise = rates[batch.probe] / rates[batch.k]

    def _end_probe(self, batch: _Batch, verify_rows: int) -> None:
        rates = self._rates(batch, verify_rows)
        told = rates[batch.probe] / rates[batch.k] > (1.0 + NEWS) * batch.promise
        batch.probe_after = FIRST_PROBE_AFTER if told else min(2 * batch.probe_after, LAST_PROBE_AFTER)
        batch.next_probe = batch.rounds + batch.probe_after
        self._review(batch, verify_rows)
