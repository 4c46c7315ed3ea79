"""Rules of the target's side of a round."""

import pytest
from protocol_harness import DRAFT, EPOCH, GREEDY, TargetBench, decode_row, messages, of

from common.messages.lifecycle import (
    Configure,
    Configured,
    DraftGone,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    SelfTest,
    SelfTestReply,
    StartOver,
    TargetHello,
)
from common.messages.rounds import (
    Admit,
    AdmitAnswer,
    Commit,
    LiveRow,
    Proposal,
    ProposalRow,
    ReleaseRow,
    Verdict,
    VerdictRow,
)
from common.messages.stamp import Stamp
from services.target import events as ev


def decoding(with_draft: bool = False, **bench: int) -> tuple[TargetBench, AdmitAnswer]:
    """A slot whose prompt of five ids has its KV, and whose bonus token is next."""
    target = TargetBench(with_draft=with_draft, **bench)
    answer = target.admit(1, [1, 2, 3, 4, 5])
    chunk = LiveRow(1, answer.slot, answer.generation, Commit(5, []), 0, 4, False)
    target.execute(target.tell(target.verify([chunk])), {})
    return target, answer


def proposal(target: TargetBench, answer: AdmitAnswer, tokens: list[int], **other: object) -> Proposal:
    fields = {
        "round": target.round,
        "acked": target.round,
        "base": 5,
        "parents": list(range(-1, len(tokens) - 1)),
    }
    fields |= {"slot": answer.slot, "generation": answer.generation} | other
    tree = ProposalRow(1, fields["slot"], fields["generation"], fields["base"], tokens, fields["parents"])
    return Proposal(target.stamp, 0, fields["round"], fields["acked"], [tree])


def first_row(effects: list) -> VerdictRow:
    return messages(effects, Verdict)[0].rows[0]


def test_hello_is_repeated_until_configured() -> None:
    target = TargetBench()
    target.now = 1.0
    effects = target.tell(StartOver(EPOCH, target.link.incarnation))
    assert messages(effects, TargetHello)
    assert messages(target.feed(ev.TimerFired("tick")), TargetHello)


def test_a_configuration_for_another_incarnation_is_dropped() -> None:
    target = TargetBench()
    target.tell(StartOver(EPOCH, target.link.incarnation))
    assert target.tell(Configure(EPOCH, 1, 20, 4, 9, 40, 4)) == []
    assert target.link.counters["stale:Configure"] == 1


def test_a_pool_that_cannot_be_made_is_said_to_the_gateway() -> None:
    target = TargetBench()
    target.tell(StartOver(EPOCH, target.link.incarnation))
    incarnation = target.link.incarnation
    target.tell(Configure(EPOCH, incarnation, 20, 4, 9, 40, 4))
    effects = target.feed(ev.PoolReady(incarnation, "", error="no memory"))
    assert messages(effects, Configured)[0].error == "no memory"
    assert target.link.incarnation != incarnation


def test_a_silent_gateway_makes_the_target_start_over_with_everything_released() -> None:
    target, _ = decoding()
    before = target.link.incarnation
    target.now = 40.0
    assert messages(target.feed(ev.TimerFired("tick")), TargetHello)
    assert target.link.incarnation != before
    assert target.link.slots is None


def test_a_gateway_that_speaks_is_not_silent() -> None:
    target = TargetBench()
    target.now = 4.0
    target.tell(Heartbeat(EPOCH, target.link.incarnation, 0, False))
    target.now = 8.0
    assert messages(target.feed(ev.TimerFired("tick")), Heartbeat)


def test_a_timer_of_an_earlier_configuration_does_nothing_while_the_pool_is_made() -> None:
    target = TargetBench()
    target.tell(StartOver(EPOCH, target.link.incarnation))
    target.tell(Configure(EPOCH, target.link.incarnation, 20, 4, 9, 40, 4))
    assert target.feed(ev.TimerFired("join:0")) == []
    assert messages(target.feed(ev.TimerFired("tick")), Heartbeat)


def test_the_next_pool_waits_for_work_of_the_configuration_before() -> None:
    target, answer = decoding()
    running = target.tell(target.verify([decode_row(answer, [], 5)]))
    target.tell(StartOver(EPOCH, target.link.incarnation))
    configure = Configure(EPOCH, target.link.incarnation, 20, 4, 9, 40, 4)
    assert not of(target.tell(configure), ev.AllocatePool)
    assert of(target.execute(running, {answer.slot: (9,)}), ev.AllocatePool)


def test_admission_reserves_the_prompt_and_the_first_step_in_whole_pages() -> None:
    target = TargetBench()
    answer = target.admit(1, [1, 2, 3, 4, 5])
    assert (answer.status, answer.allocated) == ("ok", 8)


def test_slot_zero_and_page_zero_are_never_given_out() -> None:
    target = TargetBench(pages=30)
    for request in range(1, 9):
        assert target.admit(request, [1, 2]).slot != 0
    assert all(0 not in slot.pages for slot in target.link.slots.live.values())
    free = target.link.slots.pool.free
    assert target.admit(9, [1, 2]).status == "no_slot"
    assert target.link.slots.cache.available == free


def test_admission_without_pages_is_no_room_and_takes_nothing() -> None:
    target = TargetBench(pages=5)
    target.admit(1, list(range(1, 9)))
    free = target.link.slots.pool.free
    assert target.admit(2, list(range(1, 9))).status == "no_room"
    assert target.link.slots.cache.available == free


@pytest.mark.parametrize("length", [0, 40, 41])
def test_a_log_that_leaves_no_room_for_a_token_never_fits(length: int) -> None:
    assert TargetBench().admit(1, [1] * length).status == "never_fits"


def test_a_log_larger_than_the_pool_never_fits() -> None:
    assert TargetBench(pages=3).admit(1, [1] * 9).status == "never_fits"


def test_a_prompt_of_one_id_is_a_verify_row_at_once() -> None:
    target = TargetBench()
    answer = target.admit(1, [9])
    effects = target.execute(target.tell(target.verify([decode_row(answer, [], 1)])), {answer.slot: (4,)})
    assert first_row(effects).ids == [4]


def test_the_last_chunk_may_share_its_round_with_the_verify_row() -> None:
    target = TargetBench()
    answer = target.admit(1, [1, 2, 3])
    effects = target.tell(target.verify([decode_row(answer, [], 3, chunk=(0, 2))]))
    work = of(effects, ev.Run)[0].work
    assert [chunk.ids for chunk in work.chunks] == [(1, 2)]
    assert [(tree.base, tree.tokens) for tree in work.trees] == [(3, (3,))]


def test_a_chunk_that_leaves_a_hole_is_a_gap() -> None:
    target = TargetBench()
    answer = target.admit(1, [1, 2, 3, 4])
    hole = LiveRow(1, answer.slot, answer.generation, Commit(4, []), 1, 3, False)
    assert first_row(target.tell(target.verify([hole]))).status == "gap"


def test_a_verify_row_before_the_prompt_is_computed_is_a_gap() -> None:
    target = TargetBench()
    answer = target.admit(1, [1, 2, 3, 4])
    assert first_row(target.tell(target.verify([decode_row(answer, [], 4)]))).status == "gap"


def test_a_commit_past_the_log_is_a_gap_and_says_how_long_the_log_is() -> None:
    target, answer = decoding()
    verdict_row = first_row(target.tell(target.verify([decode_row(answer, [8], 6)])))
    assert (verdict_row.status, verdict_row.base) == ("gap", 5)


def test_a_commit_that_overlaps_is_joined_once() -> None:
    target, answer = decoding()
    target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6,)})
    target.tell(target.verify([decode_row(answer, [4, 5, 6], 3)]))
    assert target.link.slots.live[answer.slot].ids == [1, 2, 3, 4, 5, 6]


def test_a_commit_against_the_log_releases_the_slot() -> None:
    target, answer = decoding()
    assert first_row(target.tell(target.verify([decode_row(answer, [9, 9], 3)]))).status == "unknown"
    assert not target.link.slots.live
    assert target.link.slots.cache.available == 19


def test_a_row_of_another_generation_is_unknown_and_its_slot_is_released() -> None:
    target, answer = decoding()
    stale = LiveRow(1, answer.slot, answer.generation + 1, Commit(5, []), 0, 0, True)
    assert first_row(target.tell(target.verify([stale]))).status == "unknown"
    assert not target.link.slots.live


def test_a_slot_that_is_not_listed_is_released() -> None:
    target, _ = decoding()
    target.tell(target.verify([]))
    assert target.link.slots.cache.available == 19


def test_a_release_of_another_generation_does_not_touch_the_slot() -> None:
    target, answer = decoding()
    stale = ReleaseRow(1, answer.slot, answer.generation - 1, Commit(5, [9]))
    target.tell(target.verify([decode_row(answer, [], 5)], releases=[stale]))
    assert target.link.slots.live[answer.slot].ids == [1, 2, 3, 4, 5]


def test_a_slot_grows_a_new_generation_each_time_it_is_given_out() -> None:
    target, first = decoding()
    target.tell(target.verify([]))
    second = target.admit(2, [1, 2])
    assert (second.slot, second.generation) == (first.slot, first.generation + 1)


def test_only_a_commit_moves_the_log() -> None:
    target, answer = decoding()
    effects = target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6, 7)})
    assert first_row(effects).ids == [6, 7]
    assert target.link.slots.live[answer.slot].ids == [1, 2, 3, 4, 5]


def test_kv_of_speculated_ids_counts_only_as_far_as_they_were_committed() -> None:
    target, answer = decoding()
    effects = target.tell(target.verify([decode_row(answer, [], 5)]))
    assert first_row(target.execute(effects, {answer.slot: (6, 7, 8)})).kv == 7
    target.tell(target.verify([decode_row(answer, [6, 9], 5)]))
    assert target.link.slots.live[answer.slot].kv == 6


def test_a_round_is_executed_once_and_a_repeat_gets_the_same_verdict() -> None:
    target, answer = decoding()
    verify = target.verify([decode_row(answer, [], 5)])
    running = target.tell(verify)
    assert target.tell(verify) == []
    verdict = messages(target.execute(running, {answer.slot: (6,)}), Verdict)[0]
    assert target.tell(verify) == [ev.SendGateway(verdict)]


@pytest.mark.parametrize("ahead", [-1, 2])
def test_a_round_out_of_order_is_dropped(ahead: int) -> None:
    target, answer = decoding()
    target.rounds[0] += ahead - 1
    assert target.tell(target.verify([decode_row(answer, [], 5)])) == []
    assert target.link.counters["stale:Verify"] == 1


@pytest.mark.parametrize("stamp", [Stamp(EPOCH + 1, 100), Stamp(EPOCH, 1)])
def test_a_round_of_another_epoch_or_for_another_incarnation_is_dropped(stamp: Stamp) -> None:
    target = TargetBench()
    verify = target.verify()
    assert target.tell(type(verify)(stamp, 0, 1, 0, [], [], [])) == []
    assert target.link.counters["stale:Verify"] == 1


def test_pages_for_every_node_of_the_next_round_are_reserved_before_the_verdict() -> None:
    target, answer = decoding()
    effects = target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6,)})
    exported, verdict = of(effects, ev.ExportRow), messages(effects, Verdict)[0]
    assert verdict.rows[0].allocated == 12 == 4 * len(exported[0].pages)
    assert effects.index(exported[0]) < effects.index(ev.SendGateway(verdict))


def test_without_pages_for_all_nodes_the_root_alone_is_reserved() -> None:
    target, answer = decoding(pages=6, page_size=2)
    running = target.tell(target.verify([decode_row(answer, [], 5)]))
    assert first_row(target.execute(running, {answer.slot: (6, 7, 8, 9)})).allocated == 10


def test_a_step_without_a_page_for_its_root_is_no_room() -> None:
    target, answer = decoding(pages=3)
    target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6, 7, 8, 9)})
    assert first_row(target.tell(target.verify([decode_row(answer, [6, 7, 8, 9], 5)]))).status == "no_room"


def test_a_failed_forward_computes_nothing_and_harms_no_slot() -> None:
    target, answer = decoding()
    running = target.tell(target.verify([decode_row(answer, [], 5)]))
    verdict = messages(target.execute(running, {}, error="bad kernel"), Verdict)[0]
    assert (verdict.rows[0].status, verdict.error) == ("failed", "bad kernel")
    again = target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6,)})
    assert first_row(again).status == "ok"


def test_a_round_waits_for_its_proposal_and_verifies_it() -> None:
    target, answer = decoding(with_draft=True)
    waiting = target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    assert not of(waiting, ev.Run)
    work = of(target.tell(proposal(target, answer, [5, 6, 7])), ev.Run)[0].work
    assert work.trees[0].tokens == (5, 6, 7)


def test_a_proposal_of_another_round_is_not_verified() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    assert target.tell(proposal(target, answer, [5, 6], round=target.round - 1)) == []
    assert target.link.counters["stale:Proposal"] == 1


def test_without_a_draft_the_target_does_not_wait() -> None:
    target, answer = decoding()
    assert of(target.tell(target.verify([decode_row(answer, [], 5)], k=3)), ev.Run)


def test_a_proposal_may_come_before_its_round() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(proposal(target, answer, [5, 6], round=target.round + 1, acked=target.round))
    work = of(target.tell(target.verify([decode_row(answer, [], 5)], k=3)), ev.Run)[0].work
    assert work.trees[0].tokens == (5, 6)


def test_at_the_deadline_the_target_verifies_without_a_proposal() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    assert not of(target.feed(ev.TimerFired("join:0")), ev.Run)
    target.now = 0.05
    effects = target.feed(ev.TimerFired("join:0"))
    assert of(effects, ev.Run)[0].work.trees[0].tokens == (5,)
    assert messages(target.execute(effects, {answer.slot: (6,)}), Verdict)[0].draft == "absent"


def test_a_proposal_after_the_deadline_is_late_and_not_verified() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    target.now = 0.05
    running = target.feed(ev.TimerFired("join:0"))
    assert target.tell(proposal(target, answer, [5, 6])) == []
    assert messages(target.execute(running, {answer.slot: (6,)}), Verdict)[0].draft == "late"


def test_with_k_zero_the_target_does_not_wait() -> None:
    target, answer = decoding(with_draft=True)
    running = target.tell(target.verify([decode_row(answer, [], 5)], k=0))
    assert messages(target.execute(running, {answer.slot: (6,)}), Verdict)[0].draft == "none"


@pytest.mark.parametrize(
    ("tokens", "other"),
    [
        ([5, 6], {"base": 4}),
        ([5, 6], {"base": 6}),
        ([4, 6], {}),
        ([5, 6], {"generation": 9}),
        ([5, 6], {"slot": 5}),
        ([5, 100], {}),
        ([5, -1], {}),
        ([5, 6, 7, 8, 9], {}),
        ([], {}),
        ([5, 6], {"parents": [-1]}),
        ([5, 6], {"parents": [-1, 1]}),
        ([5, 6], {"parents": [-1, -1]}),
        ([5, 6], {"parents": [0, 0]}),
    ],
)
def test_a_proposal_row_that_does_not_fit_is_treated_as_absent(tokens: list[int], other: dict) -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    effects = target.tell(proposal(target, answer, tokens, **other))
    assert of(effects, ev.Run)[0].work.trees[0].tokens == (5,)
    assert messages(target.execute(effects, {answer.slot: (6,)}), Verdict)[0].draft == "empty"


def test_a_second_row_for_a_slot_is_ignored() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    one, two = proposal(target, answer, [5, 6]), proposal(target, answer, [5, 7])
    both = Proposal(one.stamp, 0, one.round, one.acked, [*one.rows, *two.rows])
    assert of(target.tell(both), ev.Run)[0].work.trees[0].tokens == (5, 6)


def test_a_tree_is_cut_to_the_positions_that_the_slot_has() -> None:
    target, answer = decoding(with_draft=True, pages=3)
    target.execute(target.tell(target.verify([decode_row(answer, [], 5)])), {answer.slot: (6, 7)})
    target.tell(target.verify([decode_row(answer, [6, 7], 5)], k=3))
    work = of(target.tell(proposal(target, answer, [7, 8, 9], base=7)), ev.Run)[0].work
    assert work.trees[0].tokens == (7, 8)


def test_a_proposal_of_another_draft_is_dropped() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    late = proposal(target, answer, [5, 6])
    stamp = Stamp(EPOCH, target.link.incarnation, DRAFT + 1)
    assert target.tell(Proposal(stamp, 0, late.round, late.acked, late.rows)) == []
    assert target.link.counters["stale:Proposal"] == 1


def test_pages_of_a_released_slot_wait_for_the_draft() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(Proposal(target.stamp, 0, target.round, target.round, []))
    release = ReleaseRow(1, answer.slot, answer.generation, Commit(5, []))
    verdict = messages(target.tell(target.verify(releases=[release])), Verdict)[0]
    assert (verdict.free_pages, verdict.retiring_pages) == (17, 2)
    target.tell(Proposal(target.stamp, 0, target.round, target.round - 1, []))
    assert target.link.slots.cache.available == 17
    target.tell(Proposal(target.stamp, 0, target.round, target.round, []))
    assert target.link.slots.cache.available == 19


def test_pages_that_the_draft_has_acknowledged_in_advance_come_back_at_once() -> None:
    target, _ = decoding(with_draft=True)
    target.tell(Proposal(target.stamp, 0, target.round + 1, target.round + 1, []))
    assert messages(target.tell(target.verify()), Verdict)[0].free_pages == 19


def test_an_acknowledgement_of_rounds_that_never_were_is_ignored() -> None:
    target, _ = decoding(with_draft=True)
    target.tell(target.verify())
    target.tell(Proposal(target.stamp, 0, target.round, target.round + 2, []))
    assert target.link.slots.retiring_pages == 2


def test_pages_come_back_when_the_draft_is_gone() -> None:
    target, _ = decoding(with_draft=True)
    target.tell(target.verify())
    effects = target.tell(DraftGone(target.stamp))
    assert of(effects, ev.FreeDraft) == [ev.FreeDraft(DRAFT)]
    assert target.link.slots.cache.available == 19


def test_a_round_does_not_wait_for_a_draft_that_is_gone() -> None:
    target, answer = decoding(with_draft=True)
    target.tell(target.verify([decode_row(answer, [], 5)], k=3))
    assert of(target.tell(DraftGone(target.stamp)), ev.Run)


def test_a_draft_that_is_gone_cannot_join_again() -> None:
    target = TargetBench(with_draft=True)
    target.tell(DraftGone(target.stamp))
    assert not of(target.tell(JoinDraft(target.stamp, 1)), ev.AllocateDraft)


def test_a_new_draft_gets_every_page_table_row() -> None:
    target, answer = decoding()
    target.draft = DRAFT
    assert of(target.tell(JoinDraft(target.stamp, 1)), ev.AllocateDraft)
    effects = target.feed(ev.RegionReady(DRAFT, b"manifest"))
    assert [effect.slot for effect in of(effects, ev.ExportRow)] == [answer.slot]
    assert messages(effects, DraftRegion)[0].manifest == b"manifest"


def test_a_region_that_cannot_be_made_is_said_to_the_gateway() -> None:
    target = TargetBench()
    target.draft = DRAFT
    target.tell(JoinDraft(target.stamp, 1))
    effects = target.feed(ev.RegionReady(DRAFT, b"", error="no memory"))
    assert messages(effects, DraftRegion)[0].error == "no memory"
    assert target.link.draft == 0


def test_the_self_test_is_answered_and_verdicts_follow_only_a_good_one() -> None:
    target = TargetBench()
    target.draft = DRAFT
    target.tell(JoinDraft(target.stamp, 1))
    target.feed(ev.RegionReady(DRAFT, b"manifest"))
    assert of(target.tell(SelfTest(target.stamp, 5)), ev.TestRegion) == [ev.TestRegion(DRAFT, 5)]
    effects = target.feed(ev.RegionTested(DRAFT, 5, False))
    assert messages(effects, SelfTestReply) == [SelfTestReply(target.stamp, 5, False)]
    assert not of(target.tell(target.verify()), ev.SendDraft)
    target.feed(ev.RegionTested(DRAFT, 5, True))
    assert of(target.tell(target.verify()), ev.SendDraft)


def test_admissions_share_the_round_with_everything_else() -> None:
    target, answer = decoding()
    effects = target.tell(target.verify([decode_row(answer, [], 5)], admits=[Admit(2, [1, 2], GREEDY)]))
    verdict = messages(target.execute(effects, {answer.slot: (6,)}), Verdict)[0]
    assert verdict.rows[0].status == "ok"
    assert verdict.admitted[0].status == "ok"
