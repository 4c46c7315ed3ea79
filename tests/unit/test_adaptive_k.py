"""k by measurement, against servers whose costs and acceptance are known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from common.messages.rounds import Verdict, VerdictRow
from common.messages.stamp import Stamp
from services.gateway.acceptance import Acceptance
from services.gateway.adaptive_k import FIRST_PROBE_AFTER, AdaptiveK
from services.gateway.k_costs import CostCurve
from services.gateway.options import RoundSample

MAX_K = 8


@dataclass(frozen=True)
class Server:
    """forward_us: by rows. wait_us: by k. accepts: chance that a draft token whose parent was accepted is.
    drafts: chance that a slot has draft tokens. noise: standard deviation of a forward, as a share. reach:
    for trees instead of accepts, the chance to accept depth + 1 tokens, by depth and k."""

    forward_us: Callable[[int], float]
    wait_us: Callable[[int], float]
    accepts: float
    drafts: float = 1.0
    noise: float = 0.05
    reach: tuple[tuple[float, ...], ...] = ()

    def rate(self, k: int, rows: int) -> float:
        """Tokens per second, in the long run."""
        rng = random.Random(1)
        tokens = elapsed_us = 0.0
        for _ in range(3000):
            verdict, sample = self.round(k, rows, rng)
            tokens += sum(len(row.ids) for row in verdict.rows)
            elapsed_us += sample.wall_s * 1e6
        return 1e6 * tokens / elapsed_us

    def round(self, k: int, rows: int, rng: random.Random) -> tuple[Verdict, RoundSample]:
        answers = []
        for slot in range(rows):
            drafted = k if rng.random() < self.drafts else 0
            accepted = 0
            chance = rng.random() if self.reach else 1.0
            while accepted < len(self.reach) and chance < self.reach[accepted][k]:
                accepted += 1
            while not self.reach and accepted < drafted and rng.random() < self.accepts:
                accepted += 1
            ids = [0] * (accepted + 1)
            answers.append(VerdictRow(slot, slot, 1, "ok", 9, 9, 9, ids, drafted, accepted))
        forward_us = self.forward_us(rows + sum(row.drafted for row in answers))
        forward_us *= max(0.5, 1.0 + rng.gauss(0.0, self.noise))
        draft = "none" if k == 0 else "used" if any(row.drafted for row in answers) else "empty"
        verdict = Verdict(Stamp(1, 1, 1), 0, 1, answers, [], draft, 0, 0, round(forward_us))
        return verdict, RoundSample(k, rows, 0, (forward_us + self.wait_us(k)) * 1e-6)


FLAT = Server(lambda rows: 10_000 + 300 * rows, lambda k: 500 + 200 * k, accepts=0.8)
STEEP = Server(lambda rows: 5_000 + 4_000 * rows, lambda k: 500 + 3_000 * k, accepts=0.2)
STEPPED = Server(lambda rows: 6_000 if rows <= 4 else 12_000, lambda k: 500, accepts=0.75)
TREE = Server(
    lambda rows: 11_000 + 150 * rows,
    lambda k: 2_300 if k else 800,
    accepts=0.0,
    reach=(
        (0.0, 0.40, 0.52, 0.58, 0.62, 0.65, 0.67, 0.69, 0.70),
        (0.0, 0.00, 0.16, 0.22, 0.27, 0.30, 0.33, 0.35, 0.36),
        (0.0, 0.00, 0.00, 0.06, 0.09, 0.11, 0.13, 0.14, 0.15),
        (0.0, 0.00, 0.00, 0.00, 0.02, 0.03, 0.04, 0.05, 0.06),
    ),
)
"""A tree of few nodes is narrower at every depth, not only less deep."""
LOOKUP = Server(lambda rows: 10_000 + 400 * rows, lambda k: 300, accepts=0.6, drafts=0.3)


def run(controller: AdaptiveK, server: Server, rounds: int, rows: int = 1, seed: int = 0) -> list[int]:
    """k as asked in every round."""
    rng = random.Random(seed)
    asked = []
    for _ in range(rounds):
        k = controller.choose(rows)
        asked.append(k)
        controller.observe(*server.round(k, rows, rng))
    return asked


def chosen(controller: AdaptiveK) -> int:
    return controller.belief().k


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("server", [FLAT, STEEP, STEPPED, LOOKUP], ids=["flat", "steep", "stepped", "lookup"])
def test_k_comes_close_to_the_best_rate(server: Server, rows: int) -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, server, 1500, rows)
    best = max(server.rate(k, rows) for k in range(MAX_K + 1))
    assert server.rate(chosen(controller), rows) >= 0.93 * best


def test_k_is_0_where_drafting_does_not_pay() -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, STEEP, 400)
    assert chosen(controller) == 0


def test_k_comes_back_when_drafting_pays_again() -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, replace(FLAT, accepts=0.0), 3000)
    assert chosen(controller) == 0
    asked = run(controller, FLAT, 1800)
    assert chosen(controller) >= 4
    assert sum(asked[-300:]) / 300 >= 4


def test_k_goes_to_0_when_drafts_go_bad() -> None:
    controller = AdaptiveK(MAX_K, 3)
    good = replace(FLAT, forward_us=lambda rows: 10_000 + 1_000 * rows)
    run(controller, good, 600)
    assert chosen(controller) >= 3
    run(controller, replace(good, accepts=0.02), 600)
    assert chosen(controller) == 0


@pytest.mark.parametrize("accepts", [0.26, 0.28, 0.30, 0.32, 0.34])
def test_k_does_not_oscillate_around_a_threshold(accepts: float) -> None:
    """Costs at which some k and 0 are worth about the same."""
    server = Server(lambda rows: 10_000 + 2_500 * rows, lambda k: 500 + 500 * k, accepts, noise=0.1)
    controller = AdaptiveK(MAX_K, 1)
    run(controller, server, 500)
    rng = random.Random(5)
    choices = []
    for _ in range(3000):
        k = controller.choose(1)
        controller.observe(*server.round(k, 1, rng))
        choices.append(chosen(controller))
    changes = sum(one != other for one, other in itertools.pairwise(choices))
    assert changes <= 12


def test_k_does_not_wander_where_every_k_is_worth_the_same() -> None:
    """A forward costs as much more as its rows commit; what differs is noise alone."""
    server = Server(lambda rows: 10_000 * sum(0.5**i for i in range(rows)), lambda k: 1, 0.5, noise=0.1)
    changes = 0
    for seed in range(5):
        controller = AdaptiveK(MAX_K, 1)
        run(controller, server, 500, seed=seed)
        rng = random.Random(seed + 9)
        choices = []
        for _ in range(3000):
            controller.observe(*server.round(controller.choose(1), 1, rng))
            choices.append(chosen(controller))
        changes += sum(one != other for one, other in itertools.pairwise(choices))
    assert changes <= 20


def test_probes_of_a_settled_k_become_rare() -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, STEEP, 1000)
    asked = run(controller, STEEP, 1500)
    assert sum(k != 0 for k in asked) <= 40


def test_a_lone_slow_round_changes_nothing() -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, FLAT, FIRST_PROBE_AFTER * 8)
    before = chosen(controller)
    verdict, sample = FLAT.round(controller.choose(1), 1, random.Random(3))
    controller.observe(verdict, replace(sample, wall_s=3.0))
    run(controller, FLAT, 20)
    assert chosen(controller) == before


def test_the_same_verdicts_give_the_same_choices() -> None:
    first, second = (run(AdaptiveK(MAX_K, 3), LOOKUP, 500, seed=4) for _ in range(2))
    assert first == second


def test_rounds_with_prompt_rows_say_nothing_about_costs() -> None:
    controller = AdaptiveK(MAX_K, 3)
    verdict, sample = FLAT.round(3, 1, random.Random(3))
    for _ in range(10):
        controller.observe(verdict, replace(sample, chunk_rows=256))
    assert controller.belief().round_s == ()


def test_every_batch_size_has_a_k_of_its_own() -> None:
    shared = Server(lambda rows: 10_000 + 3_000 * max(0, rows - 8), lambda k: 500, accepts=0.6)
    controller = AdaptiveK(MAX_K, 3)
    run(controller, shared, 600, rows=1)
    alone = chosen(controller)
    run(controller, shared, 600, rows=8)
    assert alone >= 3
    assert chosen(controller) <= 1


def test_what_is_believed_is_told() -> None:
    controller = AdaptiveK(MAX_K, 3)
    run(controller, FLAT, 1500)
    belief = controller.belief()
    assert belief.accepted[0] == pytest.approx(0.8, abs=0.15)
    assert belief.round_s[0] == pytest.approx(10_800e-6, rel=0.15)
    assert belief.tokens_per_s[belief.k] == pytest.approx(FLAT.rate(belief.k, 1), rel=0.25)


def test_a_curve_is_linear_between_measurements_and_grows_beyond() -> None:
    curve = CostCurve(growth=0.1)
    curve.observe(2, 100.0)
    curve.observe(4, 200.0)
    assert curve.at(3) == 150.0
    assert curve.at(6) == pytest.approx(240.0)
    assert curve.at(1) == pytest.approx(100.0 / 1.1)


def test_what_slows_one_point_slows_the_others_in_proportion() -> None:
    curve = CostCurve(growth=0.1)
    for _ in range(8):
        curve.observe(1, 100.0)
        curve.observe(8, 200.0)
    for _ in range(60):
        curve.observe(1, 150.0)
    assert curve.at(1) == pytest.approx(150.0, rel=0.02)
    assert 1.6 <= curve.at(8) / curve.at(1) <= 2.01


def test_one_measurement_counts_as_at_most_double() -> None:
    curve = CostCurve(growth=0.1)
    for _ in range(8):
        curve.observe(1, 100.0)
    curve.observe(1, 1e6)
    assert curve.at(1) < 130.0


def test_after_long_without_drafts_a_few_new_rows_decide() -> None:
    acceptance = Acceptance(4)
    bad = VerdictRow(1, 1, 1, "ok", 9, 9, 9, [0], drafted=4, accepted=0)
    good = VerdictRow(1, 1, 1, "ok", 9, 9, 9, [0] * 5, drafted=4, accepted=4)
    for _ in range(500):
        acceptance.observe(4, [bad])
    assert acceptance.accepted()[0] < 0.02
    for _ in range(2000):
        acceptance.age()
    for _ in range(8):
        acceptance.observe(4, [good])
    assert acceptance.accepted()[0] > 0.4


def test_acceptance_is_counted_by_position_and_only_where_it_was_asked_for() -> None:
    acceptance = Acceptance(4)
    rows = [VerdictRow(1, 1, 1, "ok", 9, 9, 9, [0] * (n + 1), drafted=2, accepted=n) for n in (0, 1, 2, 2)]
    for _ in range(200):
        acceptance.observe(2, rows)
    first, second, *deeper = acceptance.accepted()
    assert first == pytest.approx(0.75, abs=0.03)
    assert second == pytest.approx(0.5, abs=0.03)
    assert acceptance.drafted() == [1.0] * 4
    assert deeper == pytest.approx([0.25, 0.125], abs=0.02)


def test_what_was_accepted_at_a_k_itself_counts_more_than_what_positions_promise() -> None:
    acceptance = Acceptance(8)
    wide = VerdictRow(1, 1, 1, "ok", 9, 9, 9, [0] * 3, drafted=8, accepted=2)
    narrow = VerdictRow(1, 1, 1, "ok", 9, 9, 9, [0], drafted=2, accepted=0)
    for _ in range(40):
        acceptance.observe(8, [wide])
    promised = acceptance.expected()
    assert promised[8] == pytest.approx(2.0, abs=0.1)
    assert promised[2] > 1.6, "nothing was measured there yet"
    for _ in range(32):
        acceptance.observe(2, [narrow])
    assert acceptance.expected()[2] < 0.7
    assert acceptance.expected()[8] > 1.3, "what a narrow tree lost says little of a wide one"


@pytest.mark.parametrize("rows", [1, 8])
def test_trees_get_the_nodes_that_pay(rows: int) -> None:
    rates = [TREE.rate(k, rows) for k in range(MAX_K + 1)]
    shares = []
    for seed in range(3):
        asked = run(AdaptiveK(MAX_K, MAX_K), TREE, 1500, rows, seed)[300:]
        shares.append(sum(rates[k] for k in asked) / len(asked) / max(rates))
    assert min(shares) > 0.9
    assert sum(shares) / 3 > 0.95
