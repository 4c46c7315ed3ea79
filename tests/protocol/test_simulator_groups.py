"""The simulator finds each rule that two groups need and that is broken here."""

import pytest
from protocol_simulator import caught

from common.messages.rounds import Verdict
from services.gateway import group as group_module
from services.gateway.coordinator import Coordinator
from services.gateway.group import Group, Shared
from services.target.rounds import Rounds as TargetRounds
from services.target.slots import Slots

TWO = {"groups": 2}


def test_the_simulator_catches_pages_freed_on_the_other_groups_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_any_group(self: Slots, group: int, acked: int) -> None:
        self._retire([entry for entry in self.retiring if entry.round <= acked])

    monkeypatch.setattr(Slots, "acknowledge", of_any_group)
    assert "the draft of" in caught(has_draft=True, **TWO)


def test_the_simulator_catches_a_verdict_that_is_taken_for_the_other_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(self: Coordinator, verdict: Verdict) -> None:
        for group in self.groups:
            group.dispatch(verdict)

    monkeypatch.setattr(Coordinator, "_pass_verdict", swapped)
    caught(**TWO)


def test_the_simulator_catches_commits_that_go_with_the_other_groups_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everyone = group_module.plan_rows

    def of_all_groups(live, workers, k, limits):
        requests = {one.request: one for one in (*live, *workers)}
        if live:
            requests.update(seen[id(limits)])
        seen[id(limits)] = dict(requests)
        return everyone(list(requests.values()), workers, k, limits)

    seen: dict[int, dict] = {}
    monkeypatch.setattr(group_module, "plan_rows", of_all_groups)
    caught(**TWO)


def test_the_simulator_catches_a_round_that_releases_the_slots_of_the_other_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Slots, "live_in", lambda self, group: list(self.live.values()))
    caught(**TWO)


def test_the_simulator_catches_a_round_that_begins_while_the_other_groups_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = TargetRounds._join

    def hasty(self: TargetRounds, proposal) -> None:
        original(self, proposal)
        self.use_device()

    monkeypatch.setattr(TargetRounds, "_join", hasty)
    assert "second round" in caught(has_draft=True, **TWO)


def test_the_simulator_catches_a_suspect_that_works_beside_the_other_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Group, "_must_wait", lambda self: False)
    assert "which work at once" in caught(forward_errors=0.3, target_crashes=2, **TWO)


def test_the_simulator_catches_what_an_older_verdict_says_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Shared.learn_of_pool

    def forgetful(self: Shared, verdict: Verdict) -> None:
        self.pool_serial = 0
        original(self, verdict)

    monkeypatch.setattr(Shared, "learn_of_pool", forgetful)
    caught(1000, **TWO)
