"""Rules of the gateway's side of a round: commits, order, room, and the end of a request."""

import pytest
from protocol_harness import DRAFT, GatewayBench, messages, of, ok_row, row

from common.messages.rounds import AdmitAnswer, Behind, Commit, Propose, VerdictRow, Verify
from common.messages.stamp import Stamp
from services.gateway import events as ev
from services.gateway.engine import SpecStats


def verify_of(effects: list) -> Verify:
    (verify,) = messages(effects, Verify)
    return verify


def running(with_draft: bool = False, **options: object) -> GatewayBench:
    """Request 1, a prompt of three ids, has its first token: 4."""
    gateway = GatewayBench(with_draft=with_draft, **options)
    gateway.run_prompt(1, [1, 2, 3])
    gateway.answer([ok_row(1, 3, [4])])
    return gateway


def seat(request: int, allocated: int = 16) -> AdmitAnswer:
    return AdmitAnswer(request, "ok", request, 1, 0, allocated)


def test_a_request_is_admitted_with_its_whole_log() -> None:
    gateway = GatewayBench()
    verify = verify_of(gateway.submit(1, [1, 2, 3]))
    assert [(admit.request, admit.ids) for admit in verify.admits] == [(1, [1, 2, 3])]


def test_the_prompt_is_computed_but_for_its_last_id_which_is_verified() -> None:
    (live,) = verify_of(GatewayBench().run_prompt(1, [1, 2, 3])).live
    assert (live.chunk_start, live.chunk_end, live.verify) == (0, 2, True)


def test_a_verify_row_that_does_not_fit_beside_the_last_chunk_waits_a_round() -> None:
    (live,) = verify_of(GatewayBench(max_rows=2).run_prompt(1, [1, 2, 3])).live
    assert (live.chunk_start, live.chunk_end, live.verify) == (0, 2, False)


def test_a_cached_prefix_is_not_computed_again() -> None:
    gateway = GatewayBench()
    gateway.submit(1, list(range(9)))
    (live,) = verify_of(gateway.answer(admitted=[AdmitAnswer(1, "ok", 1, 1, 4, 16)])).live
    assert (live.chunk_start, live.chunk_end) == (4, 8)
    (finished,) = of(gateway.feed(ev.Abort(1)), ev.Finished)
    assert finished.cached_tokens == 4


def test_a_long_prompt_is_computed_in_chunks() -> None:
    gateway = GatewayBench(chunk_rows=4)
    (live,) = verify_of(gateway.run_prompt(1, list(range(7)))).live
    assert (live.chunk_start, live.chunk_end, live.verify) == (0, 4, False)
    (live,) = verify_of(gateway.answer([row(1, "prefilled", 7, kv=4)])).live
    assert (live.chunk_start, live.chunk_end, live.verify) == (4, 6, True)


def test_decode_rows_go_before_chunks_within_the_row_budget() -> None:
    gateway = GatewayBench(max_rows=4, chunk_rows=8)
    gateway.run_prompt(1, [1])
    gateway.submit(2, list(range(9)))
    gateway.answer([ok_row(1, 1, [5])])
    one, two = verify_of(gateway.answer([ok_row(1, 2, [6])], admitted=[seat(2)])).live
    assert one.verify
    assert (two.chunk_start, two.chunk_end, two.verify) == (0, 3, False)


def test_accepted_tokens_are_committed_in_order_and_emitted_once() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3])
    effects = gateway.answer([ok_row(1, 3, [4, 5, 6], drafted=3)])
    assert of(effects, ev.Emit) == [ev.Emit(1, (4, 5, 6), (True, True, False), 3, 2)]
    assert gateway.sinks[1].text == [4, 5, 6]
    assert verify_of(effects).live[0].commit == Commit(3, [4, 5, 6])


def test_a_late_verdict_is_dropped() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3])
    gateway.answer([ok_row(1, 3, [4])])
    assert gateway.tell(gateway.verdict([ok_row(1, 3, [4])])) == []
    assert gateway.sinks[1].text == [4]
    assert gateway.gateway.counters["stale:Verdict"] == 1


@pytest.mark.parametrize("stamp", [Stamp(99, 500), Stamp(1, 501)])
def test_a_verdict_of_another_epoch_or_target_is_dropped(stamp: Stamp) -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3])
    verdict = gateway.verdict([ok_row(1, 3, [4])], round_=2)
    assert (
        gateway.tell(type(verdict)(stamp, *(getattr(verdict, n) for n in verdict.__struct_fields__[1:])))
        == []
    )
    assert gateway.sinks[1].text == []


@pytest.mark.parametrize("change", [{"base": 2}, {"generation": 2}, {"slot": 5}, {"accepted": 3}])
def test_a_row_that_does_not_continue_the_log_is_not_committed(change: dict[str, int]) -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3])
    good = ok_row(1, 3, [4])
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
    gateway.answer([VerdictRow(**fields)])
    assert gateway.sinks[1].text == []
    assert gateway.gateway.counters["stale:VerdictRow"] == 1


def test_tokens_past_a_stop_are_never_committed() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3], stop=5)
    effects = gateway.answer([ok_row(1, 3, [4, 5, 6, 7], drafted=3)])
    assert of(effects, ev.Emit) == [ev.Emit(1, (4, 5), (True, True), 3, 2)]
    assert of(effects, ev.Finished)[0].reason == "stop"


def test_tokens_past_max_tokens_are_never_committed() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3], max_tokens=2)
    effects = gateway.answer([ok_row(1, 3, [4, 5, 6])])
    assert gateway.sinks[1].text == [4, 5]
    assert of(effects, ev.Finished)[0].reason == "length"


def test_a_request_ends_at_the_end_of_the_context() -> None:
    gateway = GatewayBench(max_model_len=5)
    gateway.run_prompt(1, [1, 2, 3])
    effects = gateway.answer([ok_row(1, 3, [4, 5, 6])])
    assert gateway.sinks[1].text == [4, 5]
    assert of(effects, ev.Finished)[0].reason == "length"


def test_a_finished_request_counts_its_steps() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3], max_tokens=4)
    gateway.answer([ok_row(1, 3, [4, 5, 6], drafted=3)])
    (finished,) = of(gateway.answer([ok_row(1, 6, [7])]), ev.Finished)
    assert finished.stats == SpecStats(2, 3, 2, (1, 0, 1))


def test_the_last_round_releases_with_the_final_ids_and_then_nothing_happens() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3], max_tokens=1)
    verify = verify_of(gateway.answer([ok_row(1, 3, [4])]))
    assert verify.live == []
    assert [(one.request, one.commit) for one in verify.releases] == [(1, Commit(3, [4]))]
    assert gateway.answer() == []
    assert gateway.gateway.groups[0].state == "idle"


def test_rounds_go_on_slowly_while_pages_wait_for_the_draft() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3], max_tokens=1)
    gateway.answer([ok_row(1, 3, [4])])
    (timer,) = of(gateway.answer(retiring=1), ev.SetTimer)
    gateway.now = timer.at
    assert verify_of(gateway.feed(ev.TimerFired("pause:0"))).live == []
    (longer,) = of(gateway.answer(retiring=1), ev.SetTimer)
    assert longer.at - gateway.now > timer.at


@pytest.mark.parametrize("length", [0, 40, 41])
def test_a_request_that_could_never_fit_is_refused(length: int) -> None:
    gateway = GatewayBench()
    (failed,) = of(gateway.submit(1, [1] * length), ev.Failed)
    assert failed.code == "never_fits"


def test_a_prompt_of_one_id_less_than_the_context_runs() -> None:
    assert not of(GatewayBench().submit(1, [1] * 39), ev.Failed)


def test_the_pool_bounds_the_context() -> None:
    gateway = GatewayBench(kv_memory_bytes=16)
    assert not of(gateway.submit(1, [1] * 16), ev.Failed)
    assert of(gateway.submit(2, [1] * 17), ev.Failed)


def test_an_aborted_request_is_released_with_the_next_round() -> None:
    gateway = running()
    effects = gateway.feed(ev.Abort(1))
    assert of(effects, ev.Finished)[0].reason == "abort"
    verify = verify_of(gateway.answer([ok_row(1, 4, [5])]))
    assert [one.request for one in verify.releases] == [1]
    assert gateway.sinks[1].text == [4]


def test_a_request_aborted_while_it_is_admitted_is_released_when_the_answer_comes() -> None:
    gateway = GatewayBench()
    gateway.submit(1, [1, 2, 3])
    assert of(gateway.feed(ev.Abort(1)), ev.Finished)
    verify = verify_of(gateway.answer(admitted=[seat(1)]))
    assert [(one.request, one.slot) for one in verify.releases] == [(1, 1)]


def test_aborting_a_request_that_has_ended_does_nothing() -> None:
    assert GatewayBench().feed(ev.Abort(3)) == []


def test_requests_run_first_come_first_served_within_a_priority() -> None:
    gateway = GatewayBench(max_num_seqs=1)
    gateway.run_prompt(1, [1], max_tokens=1)
    gateway.submit(2, [2], priority=1)
    gateway.submit(3, [3])
    gateway.submit(4, [4])
    gateway.answer([ok_row(1, 1, [9])])
    assert [admit.request for admit in gateway.gateway.groups[0].round.verify.admits] == [3]


def test_no_more_requests_run_than_max_num_seqs() -> None:
    gateway = GatewayBench(max_num_seqs=2)
    gateway.submit(1, [1])
    gateway.submit(2, [2])
    gateway.submit(3, [3])
    verify = verify_of(gateway.answer(admitted=[seat(1)]))
    assert [admit.request for admit in verify.admits] == [2]


def two_running(**options: object) -> GatewayBench:
    gateway = GatewayBench(**options)
    gateway.run_prompt(1, [1])
    gateway.submit(2, [2])
    gateway.answer([ok_row(1, 1, [5])])
    gateway.answer([ok_row(1, 2, [6])], admitted=[seat(2)])
    return gateway


def test_without_room_the_youngest_request_is_released_and_queued_again() -> None:
    gateway = two_running()
    verify = verify_of(gateway.answer([row(1, "no_room", 3, kv=2), ok_row(2, 1, [7])], free=0))
    assert [one.request for one in verify.releases] == [2]
    assert [one.request for one in verify.live] == [1]
    verify = verify_of(gateway.answer([ok_row(1, 3, [8])], free=9))
    assert [(admit.request, admit.ids) for admit in verify.admits] == [(2, [2, 7])]


def test_nobody_is_released_while_pages_are_about_to_come_back() -> None:
    gateway = two_running()
    verify = verify_of(gateway.answer([row(1, "no_room", 3, kv=2), ok_row(2, 1, [7])], free=0, retiring=1))
    assert verify.releases == []


def test_a_round_in_which_nothing_moved_is_followed_by_a_pause() -> None:
    gateway = two_running()
    effects = gateway.answer([row(1, "no_room", 3, kv=2), row(2, "no_room", 1)], free=0, retiring=1)
    assert messages(effects, Verify) == []
    assert [timer.name for timer in of(effects, ev.SetTimer)] == ["pause:0"]


def test_a_released_request_is_not_admitted_into_the_last_free_pages() -> None:
    gateway = two_running()
    gateway.answer([row(1, "no_room", 3, kv=2), ok_row(2, 1, [7])], free=0)
    assert verify_of(gateway.answer([ok_row(1, 3, [8])], free=1)).admits == []


def test_an_admission_leaves_a_page_for_every_slot_that_runs() -> None:
    gateway = running()
    gateway.answer([ok_row(1, 4, [5])], free=2)
    gateway.submit(2, [1, 2])
    assert verify_of(gateway.answer([ok_row(1, 5, [5])], free=2)).admits == []
    assert verify_of(gateway.answer([ok_row(1, 6, [5])], free=3)).admits != []


def test_an_admission_without_room_waits_in_its_place() -> None:
    gateway = running()
    gateway.submit(2, [1, 2])
    gateway.answer([ok_row(1, 4, [5])])
    gateway.answer([ok_row(1, 5, [6])], admitted=[AdmitAnswer(2, "no_room")])
    assert [one.request for one in gateway.gateway.requests.waiting] == []
    assert [admit.request for admit in gateway.gateway.groups[0].round.verify.admits] == [2]


def test_a_verify_without_an_answer_is_sent_again_as_it_was() -> None:
    gateway = GatewayBench()
    first = verify_of(gateway.submit(1, [1, 2, 3]))
    gateway.now = 0.5
    assert gateway.feed(ev.TimerFired("verify:0")) == []
    gateway.now = 1.0
    assert verify_of(gateway.feed(ev.TimerFired("verify:0"))) is first


def test_a_target_that_does_not_finish_a_round_is_lost() -> None:
    gateway = GatewayBench()
    gateway.submit(1, [1, 2, 3])
    gateway.now = 60.0
    assert of(gateway.feed(ev.TimerFired("verify:0")), ev.TargetLost)


def test_a_gap_is_filled_from_the_log() -> None:
    gateway = running()
    gateway.answer([row(1, "gap", 3, kv=2)])
    gateway.now = 1.0
    (live,) = verify_of(gateway.feed(ev.TimerFired("pause:0"))).live
    assert live.commit == Commit(3, [4])


def test_a_slot_that_the_target_does_not_know_is_admitted_again() -> None:
    gateway = running()
    gateway.answer([VerdictRow(1, 1, 1, "unknown", 0, 0, 0, [])])
    gateway.now = 1.0
    verify = verify_of(gateway.feed(ev.TimerFired("pause:0")))
    assert [(admit.request, admit.ids) for admit in verify.admits] == [(1, [1, 2, 3, 4])]


def test_a_propose_carries_the_commits_that_the_draft_lacks() -> None:
    gateway = running(with_draft=True)
    (propose,) = messages(gateway.answer([ok_row(1, 4, [5, 6])], draft="used"), Propose)
    assert propose.k == 3
    assert [(one.commit, one.draft) for one in propose.rows] == [(Commit(4, [5, 6]), True)]


def test_a_draft_that_joins_in_mid_stream_gets_the_whole_log() -> None:
    gateway = running()
    gateway.join(DRAFT)
    (propose,) = messages(gateway.answer([ok_row(1, 4, [5])]), Propose)
    assert propose.rows[0].commit == Commit(0, [1, 2, 3, 4, 5])


def test_another_draft_gets_the_whole_log_again() -> None:
    gateway = running(with_draft=True)
    gateway.feed(ev.PeerLost("draft", "process exited"))
    gateway.join(DRAFT + 1)
    (propose,) = messages(gateway.answer([ok_row(1, 4, [5])]), Propose)
    assert propose.rows[0].commit == Commit(0, [1, 2, 3, 4, 5])


def test_a_draft_that_is_behind_gets_the_log_from_there() -> None:
    gateway = running(with_draft=True)
    gateway.tell(Behind(gateway.stamp, 0, [(1, 2)]), "draft")
    (propose,) = messages(gateway.answer([ok_row(1, 4, [5])]), Propose)
    assert propose.rows[0].commit == Commit(2, [3, 4, 5])


def test_k_is_cut_so_that_every_verify_row_fits() -> None:
    gateway = GatewayBench(with_draft=True, max_rows=3)
    gateway.run_prompt(1, [1])
    assert verify_of(gateway.answer([ok_row(1, 1, [5])])).k == 2


def test_misses_in_a_row_set_k_to_zero_until_the_draft_shows_progress() -> None:
    gateway = running(with_draft=True)
    for base in (4, 5):
        assert verify_of(gateway.answer([ok_row(1, base, [5])], draft="absent")).k == 3
    assert verify_of(gateway.answer([ok_row(1, 6, [5])], draft="late")).k == 0
    gateway.now = 2.0
    assert verify_of(gateway.answer([ok_row(1, 7, [5])])).k == 0
    gateway.beat(rounds=0)
    assert verify_of(gateway.answer([ok_row(1, 8, [5])])).k == 0
    gateway.beat(rounds=4, busy=True)
    assert verify_of(gateway.answer([ok_row(1, 9, [5])])).k == 0
    gateway.beat(rounds=5)
    assert verify_of(gateway.answer([ok_row(1, 10, [5])])).k == 3


def test_an_empty_proposal_is_not_a_miss() -> None:
    gateway = running(with_draft=True)
    for base in range(4, 14):
        assert verify_of(gateway.answer([ok_row(1, base, [5])], draft="empty")).k == 3


def test_a_request_whose_forward_fails_three_times_fails_and_the_others_go_on() -> None:
    gateway = two_running()
    (one, two) = verify_of(
        gateway.answer([row(1, "failed", 3, kv=2), row(2, "failed", 1)], error="boom")
    ).live
    assert (one.verify, two.verify) == (True, False)
    effects = gateway.answer([row(1, "failed", 3, kv=2), row(2, "idle", 1)], error="boom")
    assert of(effects, ev.Failed) == []
    effects = gateway.answer([row(1, "failed", 3, kv=2), row(2, "idle", 1)], error="boom")
    (failed,) = of(effects, ev.Failed)
    assert (failed.request, failed.code) == (1, "error")
    assert [(live.request, live.verify) for live in verify_of(effects).live] == [(2, True)]
    effects = gateway.answer([ok_row(2, 1, [7])])
    assert of(effects, ev.Emit)


def test_nobody_works_in_the_round_that_admits_a_suspect() -> None:
    """Should the target die in it, whoever has rows beside the suspect would be struck for it."""
    gateway = two_running()
    gateway.answer([ok_row(1, 3, [8]), row(2, "failed", 1)], error="boom")
    gateway.answer([row(1, "idle", 4, kv=3), row(2, "unknown", 0)])
    gateway.now = 1.0
    verify = verify_of(gateway.feed(ev.TimerFired("pause:0")))
    assert [admit.request for admit in verify.admits] == [2]
    assert [(one.request, one.verify) for one in verify.live] == [(1, False)]
    verify = verify_of(gateway.answer([row(1, "idle", 4, kv=3)], [seat(2)]))
    assert [(one.request, one.verify) for one in verify.live] == [(1, False), (2, True)]


def test_a_request_id_may_not_be_used_twice_at_once() -> None:
    gateway = running()
    with pytest.raises(ValueError, match="request 1"):
        gateway.submit(1, [1])
