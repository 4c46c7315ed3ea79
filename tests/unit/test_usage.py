"""Busy time, idle shares and round time as the gateway counts them; and how many groups a machine gets."""

import pytest

from common.cores import draft_threads, group_count, target_threads
from common.messages.lifecycle import Heartbeat
from common.settings import Settings
from services.gateway.usage import WINDOW_S, Usage


def beat(incarnation: int, device_us: int) -> Heartbeat:
    return Heartbeat(1, incarnation, 0, False, device_us)


def test_the_drafts_busy_time_grows_by_what_its_heartbeats_add() -> None:
    usage = Usage()
    for device_us in (1_000_000, 1_000_000, 1_500_000):
        usage.draft_beats(beat(7, device_us))
    assert usage.draft_busy_s == 1.5


def test_another_incarnation_counts_from_zero() -> None:
    usage = Usage()
    usage.draft_beats(beat(7, 1_000_000))
    usage.draft_beats(beat(8, 250_000))
    assert usage.draft_busy_s == 1.25


def test_a_heartbeat_that_comes_late_takes_nothing_back() -> None:
    usage = Usage()
    usage.draft_beats(beat(7, 1_000_000))
    usage.draft_beats(beat(7, 400_000))
    assert usage.draft_busy_s == 1.0
    usage.draft_beats(beat(7, 1_250_000))
    assert usage.draft_busy_s == 1.25


def test_overlapping_rounds_count_once() -> None:
    usage = Usage()
    for now, outstanding in ((1.0, True), (2.0, True), (3.0, True), (4.0, False), (9.0, True), (9.5, False)):
        usage.rounds_are(outstanding, now)
    assert usage.rounds_s == 3.5


def test_idle_shares_are_those_of_the_window_that_ends_with_the_last_sample() -> None:
    usage = Usage()
    usage.sample(0.0)
    usage.target_worked(9.0)
    usage.sample(WINDOW_S)
    assert usage.idle_ratios()["target"] == pytest.approx(0.1)
    usage.target_worked(1.0)
    usage.sample(2 * WINDOW_S)
    assert usage.idle_ratios()["target"] == pytest.approx(0.9)
    assert usage.idle_ratios()["draft"] == 1.0


def test_before_anything_was_measured_both_are_idle() -> None:
    assert Usage().idle_ratios() == {"target": 1.0, "draft": 1.0}


@pytest.mark.parametrize(
    ("fields", "cores", "groups"),
    [
        ({}, 2, 1),
        ({}, 3, 1),
        ({}, 4, 2),
        ({"drafter": "none"}, 16, 1),
        ({"max_num_seqs": 1}, 16, 1),
        ({"groups": 2}, 1, 2),
        ({"groups": 1}, 16, 1),
    ],
)
def test_auto_takes_two_groups_where_both_services_have_cores(
    fields: dict[str, object], cores: int, groups: int
) -> None:
    assert group_count(Settings(**fields), cores) == groups


@pytest.mark.parametrize(
    ("fields", "cores", "target", "draft"),
    [
        ({}, 2, 2, 2),
        ({}, 8, 8, 4),
        ({"groups": 1}, 8, 8, 8),
        ({"groups": 2}, 1, 1, 1),
        ({"target_threads": 3, "draft_threads": 1}, 8, 3, 1),
    ],
)
def test_the_draft_has_all_cores_where_it_works_by_turns_with_the_target(
    fields: dict[str, object], cores: int, target: int, draft: int
) -> None:
    settings = Settings(**fields)
    assert (target_threads(settings, cores), draft_threads(settings, cores)) == (target, draft)
