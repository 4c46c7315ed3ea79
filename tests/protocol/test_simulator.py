"""The simulator finds no violation in the machines, and finds each one that is put there."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import protocol_simulator
import pytest
from protocol_simulator import Simulator, caught, simulate
from toy_model import Violation

from common.messages.rounds import Verify
from services.draft.link import DraftLink
from services.draft.logs import DraftLog
from services.draft.rounds import Rounds as DraftRounds
from services.gateway import commit as commit_module
from services.gateway import group as group_module
from services.gateway.group import Group
from services.gateway.lifetimes import MAX_STRIKES, Lifetimes
from services.gateway.requests import Requests
from services.target import proposals
from services.target.link import TargetLink
from services.target.round import Round
from services.target.rounds import Rounds
from services.target.slots import Slot, Slots

LIFETIMES = 2400
BLOCK = 200


@pytest.mark.parametrize("first", range(0, LIFETIMES, BLOCK))
def test_lifetimes_under_faults_keep_every_invariant(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + BLOCK):
        simulator = simulate(seed)
        seen.update(simulator.counters)
        seen.update(simulator.gateway.counters)
    for what in (
        "accepted",
        "dropped",
        "crash:target",
        "crash:draft",
        "finished:abort",
        "row:no_room",
        "resent:Verify",
        "prefix_hits",
        "forgotten_pages",
        "rows",
    ):
        assert seen[what], f"no lifetime of this block saw {what}"


def notices(seed: int) -> bool:
    try:
        Simulator(seed).run()
    except Violation:
        return True
    return False


def test_a_seed_replays_exactly() -> None:
    runs = []
    for _ in range(2):
        simulator = Simulator(7, trace=True)
        simulator.run()
        runs.append(simulator.trace)
    assert runs[0] == runs[1]


def test_a_violation_names_its_seed_and_shows_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        commit_module, "end_reason", lambda request, token, limit: request.sink.push(token) and None
    )
    first = next(seed for seed in range(50) if notices(seed))
    with pytest.raises(Violation, match=rf"seed {first}: [^←]*\n(.|\n)*Verdict"):
        simulate(first)


def test_the_simulator_catches_a_target_that_commits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Round._verdict_row

    def eager(self: Round, planned, *result):
        row = original(self, planned, *result)
        if planned.slot is not None:
            planned.slot.ids.extend(row.ids)
        return row

    monkeypatch.setattr(Round, "_verdict_row", eager)
    assert "more than were committed" in caught()


def test_the_simulator_catches_a_draft_that_trusts_a_verdict_as_a_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DraftLog.foresee

    def eager(self: DraftLog, row) -> bool:
        known = original(self, row)
        self.ids.extend(self.tail)
        self.tail = ()
        return known

    monkeypatch.setattr(DraftLog, "foresee", eager)
    assert "log of request" in caught()


def test_the_simulator_catches_pages_given_back_while_a_slot_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Slot.join

    def shrink(self: Slot, commit) -> str:
        if len(self.pages) > 2 and commit.ids:
            self.pages.pop()
        return original(self, commit)

    monkeypatch.setattr(Slot, "join", shrink)
    assert "pages" in caught()


def test_the_simulator_catches_a_page_that_is_dropped_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Slots._give_back

    def twice(self: Slots, entry) -> None:
        self.pool.drop(entry.pages[-1])
        original(self, entry)

    monkeypatch.setattr(Slots, "_give_back", twice)
    assert "no reference left" in caught()


def test_the_simulator_catches_a_leaked_page(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Slots._give_back

    def leak(self: Slots, entry) -> None:
        original(self, replace(entry, pages=entry.pages[:-1]))

    monkeypatch.setattr(Slots, "_give_back", leak)
    assert "pages held" in caught()


def test_the_simulator_catches_a_missing_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "reserve", lambda self, slot, committed: None)
    monkeypatch.setattr(Slots, "allocated", lambda self, slot: 1000)
    assert "past the allocated pages" in caught()


def test_the_simulator_catches_a_repeat_that_is_executed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Rounds.start_round

    def again(self: Rounds, verify: Verify) -> None:
        if verify.round == self._last_round:
            self._last_round -= 1
            self._verdict = None
        original(self, verify)

    monkeypatch.setattr(Rounds, "start_round", again)
    assert "executed twice" in caught()


def test_the_simulator_catches_a_verdict_of_another_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_is_awaited", lambda self, verdict: True)
    caught()


def test_the_simulator_catches_a_base_that_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_is_awaited", lambda self, verdict: True)
    monkeypatch.setattr(group_module, "continues", lambda request, row: bool(row.ids))
    assert "token" in caught(target_crashes=0, draft_crashes=0)


def test_the_simulator_catches_services_that_take_messages_of_other_incarnations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TargetLink, "_is_current", lambda self, message: True)
    monkeypatch.setattr(DraftLink, "_is_current", lambda self, message: True)
    caught(1000)


def test_the_simulator_catches_proposals_that_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "fault", lambda row, slot, nodes, vocab_size: None)
    caught(lies=0.5)


@pytest.mark.parametrize("check", ["nodes", "root", "vocabulary", "parents"])
def test_the_simulator_catches_each_check_of_a_proposal_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    original = proposals.fault

    def lenient(*args) -> str | None:
        reason = original(*args)
        return None if reason == check else reason

    monkeypatch.setattr(proposals, "fault", lenient)
    caught(lies=0.5)


def test_the_simulator_catches_tokens_past_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        commit_module, "end_reason", lambda request, token, limit: request.sink.push(token) and None
    )
    assert "due was" in caught()


def test_the_simulator_catches_pages_that_do_not_wait_for_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Slots.release
    monkeypatch.setattr(
        Slots, "release", lambda self, slot, round_, acked: original(self, slot, round_, None)
    )
    assert "the draft of" in caught(1000)


def test_the_simulator_catches_a_draft_that_acknowledges_while_older_work_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftRounds, "_acked", lambda self: self._round)
    assert "the draft of" in caught(1000)


def test_the_simulator_catches_a_draft_that_detaches_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftLink._start_over

    def hasty(self: DraftLink) -> None:
        self.device_busy = False
        original(self)

    monkeypatch.setattr(DraftLink, "_start_over", hasty)
    assert "detaches" in caught(1000)


def test_the_simulator_catches_a_gateway_that_does_not_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(self: Group, event) -> None:
        self.set_timer(f"verify:{self.number}", self.now + 1.0)

    monkeypatch.setattr(Group, "verify_again", patient)
    caught()


def test_the_simulator_catches_a_gateway_that_never_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_simulator, "QUIET_S", 20.0)
    monkeypatch.setattr(Group, "_make_room", lambda self, verdict: False)
    assert "not drained" in caught()


def test_the_simulator_catches_a_last_round_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Requests.remove

    def forget(self: Requests, request) -> None:
        original(self, request)
        self.releases.clear()

    monkeypatch.setattr(Requests, "remove", forget)
    assert "rests while the target holds slots" in caught()


def test_the_simulator_catches_a_replay_of_everyone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_must_wait", lambda self: False)
    monkeypatch.setattr(
        group_module,
        "choose_workers",
        lambda requests, admitted, group: [one for one in requests.in_order() if one.group == group],
    )
    monkeypatch.setattr(
        group_module,
        "choose_admissions",
        lambda requests, limits, *_: requests.waiting[: limits.max_num_seqs - len(requests.seated)],
    )
    assert "which work at once" in caught(forward_errors=0.3)


def test_the_simulator_catches_a_request_that_is_failed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Lifetimes.strike

    def severe(self: Lifetimes, request, error: str) -> None:
        request.strikes += MAX_STRIKES
        request.struck_at = (len(request.ids), request.kv)
        original(self, request, error)

    monkeypatch.setattr(Lifetimes, "strike", severe)
    assert "after 1 accidents" in caught()


def test_the_simulator_catches_kv_that_is_taken_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "_joins_on", lambda self, planned, slot: True)
    monkeypatch.setattr(Requests, "go_live", _with_kv_of_the_tenancy_before(Requests.go_live))
    assert "position" in caught(sharing=0.0)


def _with_kv_of_the_tenancy_before(original: Callable) -> Callable:
    def go_live(self: Requests, request, answer) -> None:
        kv = request.kv
        original(self, request, answer)
        request.kv = kv

    return go_live
