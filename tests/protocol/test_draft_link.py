"""Rules of the draft's side of a round."""

import pytest
from protocol_harness import EPOCH, DraftBench, messages, of, propose_row

from common.messages.lifecycle import (
    DraftHello,
    DraftReady,
    Heartbeat,
    Refused,
    SelfTest,
    SelfTestReply,
    StartOver,
)
from common.messages.rounds import Behind, Proposal, Propose, VerdictRow
from common.messages.stamp import Stamp
from services.draft import events as ev
from services.draft.work import DraftResult, DraftWork, Tree


def work_of(effects: list) -> DraftWork:
    return of(effects, ev.Run)[0].work


def finish(draft: DraftBench, effects: list, guesses: list[int], error: str = "") -> list:
    """End the Run among the effects with a chain of guesses for every slot."""
    work = work_of(effects)
    trees = tuple(
        Tree(row.slot, (row.ids[-1], *guesses), tuple(range(-1, len(guesses)))) for row in work.rows if row.k
    )
    return draft.feed(ev.Executed(DraftResult(0, work.round, trees, error)))


def proposals(effects: list) -> list[tuple[int, int, list[list[int]]]]:
    """(round, acked, tokens of each row) of the proposals sent."""
    return [(one.round, one.acked, [row.tokens for row in one.rows]) for one in messages(effects, Proposal)]


def accepted(base: int, ids: list[int], request: int = 1, generation: int = 1) -> VerdictRow:
    kv = base + len(ids) - 1
    return VerdictRow(request, 3, generation, "ok", base, kv, 30, ids, 3, len(ids) - 1)


def drafting() -> DraftBench:
    """Round 1 is proposed for a log of three ids."""
    draft = DraftBench()
    finish(draft, draft.propose(1, [propose_row([1, 2, 3])]), [4, 5, 6])
    return draft


def test_a_draft_is_ready_after_both_halves_of_the_self_test() -> None:
    assert messages(DraftBench().ready, DraftReady)[0].error == ""


def test_a_repeated_configuration_gets_the_same_answer() -> None:
    draft = DraftBench()
    assert messages(draft.tell(draft.configure), DraftReady) == [DraftReady(draft.stamp)]


def test_a_region_that_does_not_fit_is_said_and_the_draft_starts_over() -> None:
    draft = DraftBench()
    draft.tell(StartOver(EPOCH, draft.link.incarnation))
    stamp = Stamp(EPOCH, 501, draft.link.incarnation)
    draft.tell(type(draft.configure)(stamp, "endpoint", b"manifest", 20, 4, 9, 40, 4))
    effects = draft.feed(ev.Attached(draft.link.incarnation, error="segment is too small"))
    assert messages(effects, DraftReady)[0].error == "segment is too small"
    assert messages(effects, DraftHello)[0].incarnation != stamp.draft


def test_a_failed_self_test_is_said_to_the_gateway() -> None:
    draft = DraftBench()
    draft.tell(StartOver(EPOCH, draft.link.incarnation))
    stamp = Stamp(EPOCH, 501, draft.link.incarnation)
    draft.tell(type(draft.configure)(stamp, "endpoint", b"manifest", 20, 4, 9, 40, 4))
    nonce = messages(draft.feed(ev.Attached(stamp.draft)), SelfTest)[0].nonce
    effects = draft.tell(SelfTestReply(stamp, nonce, False))
    assert "pattern" in messages(effects, DraftReady)[0].error


def test_a_reply_to_another_self_test_is_dropped() -> None:
    draft = DraftBench()
    draft.tell(StartOver(EPOCH, draft.link.incarnation))
    stamp = Stamp(EPOCH, 501, draft.link.incarnation)
    draft.tell(type(draft.configure)(stamp, "endpoint", b"manifest", 20, 4, 9, 40, 4))
    nonce = messages(draft.feed(ev.Attached(stamp.draft)), SelfTest)[0].nonce
    assert draft.tell(SelfTestReply(stamp, nonce + 5, True)) == []


def test_a_self_test_without_an_answer_is_repeated_and_then_fails() -> None:
    draft = DraftBench()
    draft.tell(StartOver(EPOCH, draft.link.incarnation))
    stamp = Stamp(EPOCH, 501, draft.link.incarnation)
    draft.tell(type(draft.configure)(stamp, "endpoint", b"manifest", 20, 4, 9, 40, 4))
    first = messages(draft.feed(ev.Attached(stamp.draft)), SelfTest)
    draft.now = 1.0
    assert messages(draft.feed(ev.TimerFired("tick")), SelfTest) == first
    draft.tell(Heartbeat(EPOCH, stamp.draft, 0, False))
    draft.now = 5.0
    assert "no answer" in messages(draft.feed(ev.TimerFired("tick")), DraftReady)[0].error


def test_a_refusal_is_reported_and_hello_goes_on() -> None:
    draft = DraftBench()
    draft.tell(StartOver(EPOCH, draft.link.incarnation))
    effects = draft.tell(Refused(EPOCH, draft.link.incarnation, "another vocabulary"))
    assert effects == [ev.Refused("another vocabulary")]
    assert messages(draft.feed(ev.TimerFired("tick")), DraftHello)


def test_a_propose_is_drafted_and_answered() -> None:
    draft = DraftBench()
    effects = draft.propose(1, [propose_row([1, 2, 3])])
    (row,) = work_of(effects).rows
    assert (row.ids, row.k, row.allocated, row.invalid_from) == ((1, 2, 3), 3, 30, 0)
    assert proposals(finish(draft, effects, [4, 5, 6])) == [(1, 1, [[3, 4, 5, 6]])]


def test_k_is_cut_to_the_allocated_length() -> None:
    draft = DraftBench()
    row = propose_row(list(range(29)))
    assert work_of(draft.propose(1, [row], k=3)).rows[0].k == 1


def test_a_slot_without_a_position_for_its_bonus_token_is_not_drafted_for() -> None:
    draft = DraftBench()
    assert work_of(draft.propose(1, [propose_row(list(range(31)))])).rows == ()


def test_k_zero_is_answered_at_once_with_an_empty_proposal() -> None:
    draft = DraftBench(kv_bytes_per_position=0)
    effects = draft.propose(1, [propose_row([1, 2, 3])], k=0)
    assert proposals(effects) == [(1, 1, [])]
    assert not of(effects, ev.Run)


def test_a_prompt_under_way_is_extended_over_after_the_answer() -> None:
    draft = DraftBench()
    effects = draft.propose(1, [propose_row([1, 2, 3], draft=False)], k=0)
    assert proposals(effects) == [(1, 1, [])]
    assert [(row.ids, row.k) for row in work_of(effects).rows] == [((1, 2, 3), 0)]


def test_a_busy_draft_answers_at_once_with_an_empty_proposal() -> None:
    draft = DraftBench()
    running = draft.propose(1, [propose_row([1, 2, 3])])
    assert proposals(draft.propose(2, [propose_row([4], start=3)])) == [(2, 1, [])]
    assert proposals(finish(draft, running, [4, 5, 6])) == [(2, 2, [])]


def test_acked_stays_behind_while_work_of_an_older_live_set_runs() -> None:
    draft = DraftBench()
    running = draft.propose(1, [propose_row([1, 2, 3])])
    assert proposals(draft.propose(2, []))[0][1] == 1
    assert proposals(draft.propose(3, []))[0][1] == 1
    assert proposals(finish(draft, running, [4])) == [(3, 3, [])]


def test_a_propose_waits_for_the_verdict_of_the_round_before() -> None:
    draft = drafting()
    waiting = draft.propose(2, [propose_row([4], start=3)])
    assert not of(waiting, ev.Run)
    effects = draft.verdict(1, [accepted(3, [4])])
    assert work_of(effects).rows[0].ids == (1, 2, 3, 4)


def test_a_verdict_that_does_not_come_is_waited_for_until_the_deadline() -> None:
    draft = drafting()
    draft.propose(2, [propose_row([4], start=3)])
    assert not of(draft.feed(ev.TimerFired("join:0")), ev.Run)
    draft.now = 0.005
    assert of(draft.feed(ev.TimerFired("join:0")), ev.Run)


def test_the_first_propose_of_a_draft_waits_for_nothing() -> None:
    assert of(DraftBench().propose(17, [propose_row([1, 2, 3])]), ev.Run)


def test_work_begins_with_the_verdict_and_is_answered_with_the_propose() -> None:
    draft = drafting()
    effects = draft.verdict(1, [accepted(3, [4, 9])])
    assert work_of(effects).rows[0].ids == (1, 2, 3, 4, 9)
    assert finish(draft, effects, [7]) == []
    assert proposals(draft.propose(2, [propose_row([4, 9], start=3)])) == [(2, 2, [[9, 7]])]


def test_a_propose_joins_the_work_that_its_verdict_began() -> None:
    draft = drafting()
    effects = draft.verdict(1, [accepted(3, [4])])
    assert proposals(draft.propose(2, [propose_row([4], start=3)])) == []
    assert proposals(finish(draft, effects, [7])) == [(2, 2, [[4, 7]])]


def test_a_commit_that_is_not_the_verdicts_ids_drops_what_was_drafted_after_them() -> None:
    draft = drafting()
    finish(draft, draft.verdict(1, [accepted(3, [4, 9])]), [7])
    assert proposals(draft.propose(2, [propose_row([4], start=3)])) == [(2, 2, [])]


def test_drafter_state_of_ids_that_were_not_committed_is_named_invalid() -> None:
    draft = drafting()
    finish(draft, draft.verdict(1, [accepted(3, [4, 9])]), [7])
    draft.propose(2, [propose_row([4, 8], start=3)])
    effects = draft.verdict(2, [accepted(5, [6])])
    (row,) = work_of(effects).rows
    assert (row.ids, row.invalid_from) == ((1, 2, 3, 4, 8, 6), 4)


def test_a_failed_work_makes_all_drafter_state_invalid() -> None:
    draft = DraftBench()
    effects = draft.propose(1, [propose_row([1, 2, 3])])
    assert proposals(finish(draft, effects, [], error="out of memory")) == [(1, 1, [])]
    draft.verdict(1, [])
    assert work_of(draft.propose(2, [propose_row([4], start=3)])).rows[0].invalid_from == 0


def test_a_verdict_never_moves_the_log() -> None:
    draft = drafting()
    draft.verdict(1, [accepted(3, [4, 9])])
    assert [log.ids for log in draft.link.groups.logs] == [[1, 2, 3]]


def test_a_verdict_row_for_another_tenancy_is_ignored() -> None:
    draft = drafting()
    assert not of(draft.verdict(1, [accepted(3, [4], generation=2)]), ev.Run)


def test_a_late_verdict_is_dropped() -> None:
    draft = drafting()
    draft.verdict(1, [accepted(3, [4])])
    assert draft.verdict(1, [accepted(3, [4])]) == []
    assert draft.link.counters["stale:Verdict"] == 1


def test_a_gap_is_reported_and_not_drafted_over() -> None:
    draft = drafting()
    draft.verdict(1, [])
    effects = draft.propose(2, [propose_row([6], start=5)])
    assert messages(effects, Behind) == [Behind(draft.stamp, 0, [(1, 3)])]
    assert not of(effects, ev.Run) or work_of(effects).rows == ()


def test_a_gap_keeps_the_other_slots_drafting() -> None:
    draft = DraftBench()
    first = [propose_row([1, 2, 3]), propose_row([1, 2], request=2, slot=4)]
    finish(draft, draft.propose(1, first), [4])
    draft.verdict(1, [])
    second = [propose_row([6], start=5), propose_row([3], start=2, request=2, slot=4)]
    assert [row.slot for row in work_of(draft.propose(2, second)).rows] == [4]


def test_a_prompt_with_a_gap_is_not_extended_over() -> None:
    draft = drafting()
    draft.verdict(1, [])
    draft.link.groups.rounds[0].logs[3].handed = ()
    effects = draft.propose(2, [propose_row([6], start=5, draft=False)])
    assert not of(effects, ev.Run)


def test_a_prompt_with_a_gap_is_not_extended_over_beside_others() -> None:
    draft = drafting()
    draft.verdict(1, [])
    draft.link.groups.rounds[0].logs[3].handed = ()
    rows = [propose_row([6], start=5, draft=False), propose_row([1, 2], request=2, slot=4)]
    assert [row.slot for row in work_of(draft.propose(2, rows)).rows] == [4]


def test_what_was_drafted_early_is_not_proposed_after_a_gap() -> None:
    """The verdict announced nothing new, so the work's ids are the log's; the commit says that the log goes
    on."""
    draft = drafting()
    prefilled = VerdictRow(1, 3, 1, "prefilled", 3, 3, 30, [])
    finish(draft, draft.verdict(1, [prefilled]), [7])
    assert proposals(draft.propose(2, [propose_row([6], start=5)])) == [(2, 2, [])]
    assert draft.link.counters["drafted_past_commit"] == 1


def test_a_slot_without_an_id_is_not_drafted_for() -> None:
    assert work_of(DraftBench().propose(1, [propose_row([])])).rows == ()


def test_a_commit_that_overlaps_is_joined_once() -> None:
    draft = drafting()
    draft.verdict(1, [])
    assert work_of(draft.propose(2, [propose_row([2, 3, 4], start=1)])).rows[0].ids == (1, 2, 3, 4)


def test_a_commit_against_the_log_wins() -> None:
    draft = drafting()
    draft.verdict(1, [])
    (row,) = work_of(draft.propose(2, [propose_row([9, 9], start=1)])).rows
    assert (row.ids, row.invalid_from) == ((1, 9, 9), 1)


def test_another_tenancy_of_a_slot_starts_with_an_empty_log() -> None:
    draft = drafting()
    draft.verdict(1, [])
    effects = draft.propose(2, [propose_row([7, 8], request=2, generation=2)])
    work = work_of(effects)
    assert (work.rows[0].ids, work.rows[0].key, work.released) == ((7, 8), (2, 2), (3,))


def test_a_slot_that_is_not_listed_is_dropped_with_the_next_work() -> None:
    draft = drafting()
    draft.propose(2, [])
    draft.verdict(2, [])
    assert work_of(draft.propose(3, [propose_row([1], slot=4)])).released == (3,)


@pytest.mark.parametrize("round_", [0, 1])
def test_a_propose_that_is_not_newer_is_dropped(round_: int) -> None:
    draft = drafting()
    assert draft.propose(round_, []) == []
    assert draft.link.counters["stale:Propose"] == 1


def test_a_propose_of_another_target_is_dropped() -> None:
    draft = DraftBench()
    stamp = Stamp(EPOCH, 501, draft.link.incarnation)
    assert draft.tell(Propose(stamp, 0, 1, 3, [propose_row([1])])) == []


def test_a_draft_that_is_told_to_start_over_detaches_and_takes_a_new_incarnation() -> None:
    draft = drafting()
    before = draft.link.incarnation
    effects = draft.tell(StartOver(EPOCH, before))
    assert of(effects, ev.Detach)
    assert messages(effects, DraftHello)[0].incarnation == draft.link.incarnation != before


def test_a_draft_detaches_only_when_its_device_is_done() -> None:
    draft = DraftBench()
    running = draft.propose(1, [propose_row([1, 2, 3])])
    assert draft.tell(StartOver(EPOCH, draft.link.incarnation)) == []
    assert of(finish(draft, running, [4]), ev.Detach)


def test_a_start_over_for_another_incarnation_is_dropped() -> None:
    draft = DraftBench()
    assert draft.tell(StartOver(EPOCH, draft.link.incarnation - 1)) == []


def test_a_silent_gateway_makes_the_draft_start_over() -> None:
    draft = DraftBench()
    draft.now = 31.0
    assert messages(draft.feed(ev.TimerFired("tick")), DraftHello)


def test_heartbeats_tell_progress_and_whether_the_device_works() -> None:
    draft = drafting()
    assert messages(draft.feed(ev.TimerFired("tick")), Heartbeat)[0].rounds == 1
    draft.verdict(1, [accepted(3, [4])])
    beat = messages(draft.feed(ev.TimerFired("tick")), Heartbeat)[0]
    assert (beat.rounds, beat.busy) == (1, True)
