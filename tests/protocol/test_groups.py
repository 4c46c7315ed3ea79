"""Rules of two groups: each has its rounds, and they share slots, pages and devices."""

import pytest
from protocol_harness import (
    GREEDY,
    DraftBench,
    GatewayBench,
    TargetBench,
    decode_row,
    messages,
    of,
    ok_row,
    propose_row,
    row,
)

from common.messages.rounds import (
    AdmitAnswer,
    Commit,
    LiveRow,
    Proposal,
    ProposalRow,
    Propose,
    ReleaseRow,
    Verdict,
    Verify,
)
from services.draft import events as dev
from services.draft.work import DraftResult
from services.gateway import events as gev
from services.target import events as tev

# Gateway


def seat(request: int) -> AdmitAnswer:
    return AdmitAnswer(request, "ok", request, 1, 0, 16)


def verifies(effects: list) -> dict[int, Verify]:
    return {verify.group: verify for verify in messages(effects, Verify)}


def two_running(**options: object) -> GatewayBench:
    """Request 1 runs in group 0, request 2 in group 1; both wait for the verdict of their first token."""
    gateway = GatewayBench(groups=2, **options)
    gateway.submit(1, [1])
    gateway.submit(2, [2])
    gateway.answer(admitted=[seat(1)], group=0)
    gateway.answer(admitted=[seat(2)], group=1)
    return gateway


def test_requests_go_to_the_group_with_fewer() -> None:
    gateway = GatewayBench(groups=2)
    for request in (1, 2, 3, 4):
        gateway.submit(request, [request])
    assert [one.request for one in gateway.gateway.groups[0].round.verify.admits] == [1]
    assert [one.request for one in gateway.gateway.groups[1].round.verify.admits] == [2]
    verify = verifies(gateway.answer(admitted=[seat(2)], group=1))[1]
    assert [one.request for one in verify.admits] == [3]
    verify = verifies(gateway.answer(admitted=[seat(1)], group=0))[0]
    assert [one.request for one in verify.admits] == [4]


def test_no_more_requests_run_in_both_groups_than_max_num_seqs() -> None:
    gateway = GatewayBench(groups=2, max_num_seqs=1)
    gateway.submit(1, [1])
    assert verifies(gateway.submit(2, [2])) == {}
    assert verifies(gateway.answer(admitted=[seat(1)], group=0))[0].admits == []


def test_the_rounds_of_the_groups_do_not_wait_for_one_another() -> None:
    gateway = two_running()
    for base in (1, 2, 3):
        effects = gateway.answer([ok_row(1, base, [7])], group=0)
        assert [(one.group, one.round) for one in messages(effects, Verify)] == [(0, base + 2)]
    assert gateway.gateway.groups[1].round.verify.round == 2
    assert of(gateway.answer([ok_row(2, 1, [8])], group=1), gev.Emit) == [gev.Emit(2, (8,), (False,), 0, 0)]


def test_a_verdict_row_for_a_request_of_the_other_group_is_not_committed() -> None:
    gateway = two_running()
    assert not of(gateway.answer([ok_row(2, 1, [8])], group=0), gev.Emit)
    assert gateway.gateway.counters["stale:VerdictRow"] == 1


def test_a_verdict_of_no_group_is_dropped() -> None:
    gateway = two_running()
    assert gateway.answer([ok_row(1, 1, [8])], group=2) == []
    assert gateway.gateway.counters["no_group:Verdict"] == 1


def test_an_ended_request_is_released_with_the_round_of_its_group() -> None:
    gateway = two_running()
    gateway.feed(gev.Abort(2))
    assert verifies(gateway.answer([ok_row(1, 1, [7])], group=0))[0].releases == []
    verify = verifies(gateway.answer([ok_row(2, 1, [8])], group=1))[1]
    assert [one.request for one in verify.releases] == [2]


def test_a_propose_names_the_newest_round_that_was_sent_for_each_group() -> None:
    gateway = two_running(with_draft=True)
    (first,) = messages(gateway.answer([ok_row(1, 1, [7])], group=0), Propose)
    assert (first.group, first.round, first.sent) == (0, 3, [3, 2])
    (second,) = messages(gateway.answer([ok_row(2, 1, [8])], group=1), Propose)
    assert (second.group, second.round, second.sent) == (1, 3, [3, 3])


def test_without_room_the_youngest_request_of_all_groups_is_released() -> None:
    gateway = two_running()
    gateway.answer([row(1, "no_room", 1)], free=0, group=0)
    assert gateway.gateway.requests.waiting[0].request == 2
    verify = verifies(gateway.answer([ok_row(2, 1, [8])], free=0, group=1))[1]
    assert ([one.request for one in verify.releases], verify.live) == ([2], [])


def test_nobody_is_released_while_the_other_groups_releases_are_on_the_way() -> None:
    gateway = two_running()
    gateway.submit(3, [3])
    gateway.answer([ok_row(1, 1, [7])], admitted=[], group=0)
    gateway.answer([ok_row(1, 2, [7])], admitted=[seat(3)], group=0)
    gateway.feed(gev.Abort(2))
    gateway.answer([ok_row(2, 1, [8])], group=1)
    gateway.answer([row(1, "no_room", 3, kv=2), row(3, "no_room", 1)], free=0, group=0)
    assert gateway.gateway.counters["preempted"] == 0


def test_a_suspect_works_while_the_other_group_rests() -> None:
    gateway = two_running()
    assert verifies(gateway.answer([row(1, "failed", 1)], error="boom", group=0)) == {}
    effects = gateway.answer([ok_row(2, 1, [8])], group=1)
    assert [(one.group, [live.verify for live in one.live]) for one in messages(effects, Verify)] == [
        (0, [True])
    ]
    assert set(verifies(gateway.answer([ok_row(1, 1, [7])], group=0))) == {0, 1}


def test_when_the_target_dies_the_work_of_every_group_is_suspect_and_replayed_one_at_a_time() -> None:
    gateway = two_running()
    gateway.feed(gev.PeerLost("target", "process exited"))
    assert all(one.suspect for one in gateway.gateway.requests.by_id.values())
    (verify,) = messages(gateway.serve(501), Verify)
    assert [one.request for one in verify.admits] == [1]
    (verify,) = messages(gateway.answer(admitted=[seat(1)], group=verify.group), Verify)
    assert [one.request for one in verify.live] == [1]
    assert verify.admits == []
    effects = gateway.answer([ok_row(1, 1, [7])], group=verify.group)
    assert [admit.request for one in messages(effects, Verify) for admit in one.admits] == [2]


def test_what_an_older_verdict_says_of_the_pool_is_out_of_date() -> None:
    gateway = two_running()
    for group, serial, free in ((1, 6, 3), (0, 5, 9)):
        gateway.rounds[group] += 1
        rows = [ok_row(2 if group else 1, 1, [7])]
        stamp, number = gateway.stamp, gateway.rounds[group]
        gateway.tell(Verdict(stamp, group, number, rows, [], "none", free, 0, 10, serial=serial))
    assert gateway.gateway.free_pages == 3


def test_device_time_of_the_other_group_does_not_count_as_waiting() -> None:
    gateway = two_running()
    round_ = gateway.gateway.groups[1].round
    gateway.now = 0.5
    gateway.rounds[0] += 1
    gateway.tell(Verdict(gateway.stamp, 0, gateway.rounds[0], [ok_row(1, 1, [7])], [], "none", 9, 0, 300_000))
    assert round_.elsewhere_s == 0.3


# Target


def two_decoding(**bench: object) -> tuple[TargetBench, AdmitAnswer, AdmitAnswer]:
    """A slot in each group, whose bonus token is its only id."""
    target = TargetBench(groups=2, **bench)
    return target, target.admit(1, [9], group=0), target.admit(2, [8], group=1)


def test_a_round_leaves_the_slots_of_the_other_group_alone() -> None:
    target, _, two = two_decoding()
    target.tell(target.verify(group=0))
    assert [slot.request for slot in target.link.slots.live.values()] == [2]
    target.tell(target.verify(releases=[ReleaseRow(2, two.slot, two.generation, Commit(1, []))], group=0))
    assert [slot.request for slot in target.link.slots.live.values()] == [2]


def test_a_slot_of_the_other_group_is_unknown() -> None:
    target, one, two = two_decoding()
    keep = LiveRow(1, one.slot, one.generation, Commit(1, []), 0, 0, False)
    effects = target.tell(target.verify([keep, decode_row(two, [5], 1)], group=0))
    assert [answer.status for answer in messages(effects, Verdict)[0].rows] == ["idle", "unknown"]
    assert target.link.slots.live[two.slot].ids == [8]


def test_a_round_waits_for_the_device_while_the_other_groups_runs() -> None:
    target, one, two = two_decoding()
    running = target.tell(target.verify([decode_row(one, [], 1)], group=0))
    assert not of(target.tell(target.verify([decode_row(two, [], 1)], group=1)), tev.Run)
    effects = target.execute(running, {one.slot: (4,)})
    assert [verdict.group for verdict in messages(effects, Verdict)] == [0]
    assert [run.work.group for run in of(effects, tev.Run)] == [1]


def test_a_round_without_work_does_not_wait_for_the_device() -> None:
    target, one, _ = two_decoding()
    target.tell(target.verify([decode_row(one, [], 1)], group=0))
    assert [verdict.group for verdict in messages(target.tell(target.verify(group=1)), Verdict)] == [1]


def test_a_proposal_after_its_deadline_is_joined_while_the_round_waits_for_the_device() -> None:
    target, one, two = two_decoding(with_draft=True)
    running = target.tell(target.verify([decode_row(one, [], 1)], group=0))
    target.tell(target.verify([decode_row(two, [], 1)], k=3, group=1))
    target.now = 1.0
    target.feed(tev.TimerFired("join:1"))
    tree = ProposalRow(2, two.slot, two.generation, 1, [8, 5], [-1, 0])
    target.tell(Proposal(target.stamp, 1, target.rounds[1], target.rounds[1], [tree]))
    (run,) = of(target.execute(running, {one.slot: (4,)}), tev.Run)
    assert run.work.trees[0].tokens == (8, 5)


def test_a_draft_that_is_gone_while_a_round_is_queued_leaves_it_without_a_proposal() -> None:
    target, one, two = two_decoding(with_draft=True)
    running = target.tell(target.verify([decode_row(one, [], 1)], group=0))
    target.tell(target.verify([decode_row(two, [], 1)], k=3, group=1))
    tree = ProposalRow(2, two.slot, two.generation, 1, [8, 5], [-1, 0])
    target.tell(Proposal(target.stamp, 1, target.rounds[1], target.rounds[1], [tree]))
    target.link.groups.draft_joins(target.stamp)
    (run,) = of(target.execute(running, {one.slot: (4,)}), tev.Run)
    assert run.work.trees[0].tokens == (8,)


@pytest.mark.parametrize(("group", "free"), [(1, 17), (0, 18)])
def test_pages_wait_for_the_acknowledgement_of_their_own_group(group: int, free: int) -> None:
    target, one, two = two_decoding(with_draft=True)
    target.tell(target.verify(releases=[ReleaseRow(1, one.slot, one.generation, Commit(1, []))], group=0))
    target.tell(target.verify([decode_row(two, [], 1)], group=1))
    assert target.link.slots.cache.available == 17
    target.tell(Proposal(target.stamp, group, 2, 2, []))
    assert target.link.slots.cache.available == free


def test_each_group_repeats_its_own_verdict() -> None:
    target, one, two = two_decoding()
    verdicts, asked = {}, {}
    for group, answer in ((0, one), (1, two)):
        asked[group] = target.verify([decode_row(answer, [], 1)], group=group)
        verdicts[group] = messages(target.execute(target.tell(asked[group]), {answer.slot: (4,)}), Verdict)[0]
    for group in (0, 1):
        assert target.tell(asked[group]) == [tev.SendGateway(verdicts[group])]
    assert verdicts[1].serial == verdicts[0].serial + 1


def test_a_round_of_a_group_that_was_not_configured_is_dropped() -> None:
    target = TargetBench(groups=2)
    assert target.tell(Verify(target.stamp, 2, 1, 0, [], [], [])) == []
    assert target.link.counters["no_group:Verify"] == 1


# Draft


def work_groups(effects: list) -> list[int]:
    return [run.work.group for run in of(effects, dev.Run)]


def done(draft: DraftBench, group: int, round_: int) -> list:
    return draft.feed(dev.Executed(DraftResult(group, round_, ())))


def acks(effects: list) -> list[tuple[int, int, int]]:
    return [(one.group, one.round, one.acked) for one in messages(effects, Proposal)]


def test_a_propose_waits_for_the_device_while_it_works_for_the_other_group() -> None:
    draft = DraftBench(groups=2)
    assert work_groups(draft.propose(1, [propose_row([1, 2])], group=0)) == [0]
    assert draft.propose(1, [propose_row([3], request=2, slot=4)], group=1) == []
    effects = done(draft, 0, 1)
    assert (acks(effects), work_groups(effects)) == ([(0, 1, 1)], [1])
    assert acks(done(draft, 1, 1)) == [(1, 1, 1)]


def test_work_for_one_group_does_not_hold_the_others_acknowledgement() -> None:
    draft = DraftBench(groups=2)
    draft.propose(1, [propose_row([1, 2])], group=0)
    assert acks(draft.propose(1, [], group=1)) == [(1, 1, 1)]
    assert acks(draft.propose(2, [], group=0)) == [(0, 2, 1)]


def test_work_ahead_of_a_propose_begins_when_the_other_groups_work_has_ended() -> None:
    draft = DraftBench(groups=2)
    draft.propose(1, [propose_row([1, 2])], group=0)
    done(draft, 0, 1)
    draft.propose(1, [propose_row([3], request=2, slot=4)], group=1)
    assert draft.verdict(1, [accepted(2, [5])], group=0) == []
    effects = done(draft, 1, 1)
    assert [run.work.rows[0].ids for run in of(effects, dev.Run)] == [(1, 2, 5)]


def accepted(base: int, ids: list[int]):
    answer = ok_row(1, base, ids)
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    return type(answer)(**{**fields, "slot": 3, "allocated": 30})


def test_no_work_begins_for_a_group_of_which_a_propose_was_missed_until_it_is_made_good() -> None:
    draft = DraftBench(groups=2)
    draft.propose(1, [propose_row([1, 2])], group=0, sent=(1, 0))
    done(draft, 0, 1)
    draft.propose(1, [], group=1, sent=(2, 1))
    assert work_groups(draft.verdict(1, [accepted(2, [5])], group=0)) == []
    assert draft.link.counters["gap"] == 0
    assert work_groups(draft.propose(2, [propose_row([5], start=2)], group=0, sent=(2, 1))) == [0]


def test_a_propose_that_is_older_than_one_that_was_sent_is_answered_with_nothing() -> None:
    draft = DraftBench(groups=2)
    draft.propose(1, [], group=1, sent=(2, 1))
    effects = draft.propose(1, [propose_row([1, 2])], group=0, sent=(1, 0))
    assert (acks(effects), work_groups(effects)) == ([(0, 1, 1)], [])


def test_slots_that_one_group_dropped_go_with_the_next_work_of_any() -> None:
    draft = DraftBench(groups=2)
    draft.propose(1, [propose_row([1, 2])], group=0)
    done(draft, 0, 1)
    draft.propose(2, [], group=0)
    (run,) = of(draft.propose(1, [propose_row([3], request=2, slot=4)], group=1), dev.Run)
    assert run.work.released == (3,)


def test_sampling_of_both_groups_reaches_the_drafter() -> None:
    draft = DraftBench(groups=2)
    (run,) = of(draft.propose(1, [propose_row([1])], group=1), dev.Run)
    assert (run.work.group, run.work.rows[0].sampling) == (1, GREEDY)
