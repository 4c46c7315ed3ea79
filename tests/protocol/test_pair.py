"""Rules of start-up, return and liveness as the gateway drives them."""

import pytest
from protocol_harness import DRAFT, GatewayBench, draft_hello, messages, of, ok_row, target_hello

from common.messages.lifecycle import (
    Configure,
    Configured,
    ConfigureDraft,
    DraftGone,
    DraftReady,
    DraftRegion,
    Heartbeat,
    JoinDraft,
    Refused,
    StartOver,
)
from common.messages.rounds import AdmitAnswer, Verify
from common.messages.stamp import Stamp
from services.gateway import events as ev


def test_the_target_serves_as_soon_as_it_is_configured() -> None:
    gateway = GatewayBench()
    assert gateway.gateway.target_ready
    assert not gateway.gateway.draft_ready


def test_pages_follow_from_the_memory_and_the_models_bytes_per_position() -> None:
    gateway = GatewayBench(kv_memory_bytes=1000)
    gateway.tell(StartOver(0, 0))
    (configure,) = messages(gateway.tell(target_hello(501, kv_bytes_per_position=10)), Configure)
    assert configure.pages == 1 + 1000 // (10 * 4)
    assert configure.slots == 9


@pytest.mark.parametrize(("positions", "pages"), [(33, 8), (10**6, 2 * 4 * 10)])
def test_without_a_given_memory_the_target_says_how_many_positions_there_are(
    positions: int, pages: int
) -> None:
    gateway = GatewayBench(kv_memory_bytes=None)
    hello = target_hello(501, kv_bytes_per_position=10, kv_positions=positions)
    (configure,) = messages(gateway.tell(hello), Configure)
    assert configure.pages == 1 + pages


def test_a_given_memory_wins_over_what_the_target_says() -> None:
    gateway = GatewayBench(kv_memory_bytes=1000)
    hello = target_hello(501, kv_bytes_per_position=10, kv_positions=1)
    (configure,) = messages(gateway.tell(hello), Configure)
    assert configure.pages == 1 + 1000 // (10 * 4)


def test_a_target_without_room_for_a_page_is_refused() -> None:
    gateway = GatewayBench(kv_memory_bytes=None)
    (refused,) = messages(gateway.tell(target_hello(501, kv_positions=3)), Refused)
    assert "less than one page" in refused.reason


def test_the_resident_size_of_a_service_is_known_while_it_is_there() -> None:
    gateway = GatewayBench(with_draft=True)
    epoch = gateway.gateway.epoch
    gateway.tell(Heartbeat(epoch, 500, 0, False, resident_bytes=7))
    gateway.tell(Heartbeat(epoch, DRAFT, 0, False, resident_bytes=5), "draft")
    assert gateway.gateway.resident_bytes == {"target": 7, "draft": 5}
    gateway.feed(ev.PeerLost("draft", "gone"))
    assert gateway.gateway.resident_bytes == {"target": 7}
    gateway.feed(ev.PeerLost("target", "gone"))
    assert gateway.gateway.resident_bytes == {}


def test_memory_for_less_than_a_page_is_refused_by_name() -> None:
    gateway = GatewayBench(kv_memory_bytes=30)
    (refused,) = messages(gateway.tell(target_hello(501, kv_bytes_per_position=10)), Refused)
    assert "40 bytes" in refused.reason
    assert gateway.gateway.target_ready
    assert not of(gateway.tell(target_hello(501, kv_bytes_per_position=10)), ev.TargetLost)


def test_requests_wait_for_a_target() -> None:
    gateway = GatewayBench()
    gateway.feed(ev.PeerLost("target", "process exited"))
    assert not messages(gateway.submit(1, [1]), Verify)
    assert messages(gateway.serve(501), Verify)[0].admits[0].request == 1


def test_start_up_messages_without_an_answer_are_repeated() -> None:
    gateway = GatewayBench()
    first = messages(gateway.tell(target_hello(501)), Configure)
    assert messages(gateway.feed(ev.TimerFired("tick")), Configure) == first
    gateway.target = 501
    gateway.tell(Configured(gateway.gateway.epoch, 501, "endpoint"))
    gateway.draft = DRAFT
    joining = messages(gateway.tell(draft_hello(DRAFT), "draft"), JoinDraft)
    assert messages(gateway.feed(ev.TimerFired("tick")), JoinDraft) == joining
    configuring = messages(gateway.tell(DraftRegion(gateway.stamp, b"manifest")), ConfigureDraft)
    assert messages(gateway.feed(ev.TimerFired("tick")), ConfigureDraft) == configuring


def test_a_draft_before_its_target_joins_when_the_target_serves() -> None:
    gateway = GatewayBench()
    gateway.feed(ev.PeerLost("target", "process exited"))
    assert not messages(gateway.tell(draft_hello(DRAFT), "draft"), JoinDraft)
    assert messages(gateway.serve(501), JoinDraft)


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 99), ("tokenizer", "xyz")])
def test_a_draft_with_another_vocabulary_is_refused_by_name(name: str, value: object) -> None:
    gateway = GatewayBench()
    effects = gateway.tell(draft_hello(DRAFT, **{name: value}), "draft")
    (refused,) = messages(effects, Refused)
    assert name in refused.reason
    assert str(value) in refused.reason
    assert of(effects, ev.PeerRefused)
    again = gateway.tell(draft_hello(DRAFT, **{name: value}), "draft")
    assert messages(again, Refused)
    assert not of(again, ev.PeerRefused)


@pytest.mark.parametrize("peer", ["target", "draft"])
def test_another_protocol_version_is_refused(peer: str) -> None:
    gateway = GatewayBench()
    hello = target_hello if peer == "target" else draft_hello
    assert "protocol 99" in messages(gateway.tell(hello(777, protocol=99), peer), Refused)[0].reason


def test_a_target_with_another_tokenizer_than_the_gateways_is_refused() -> None:
    gateway = GatewayBench(tokenizer="abc")
    assert "tokenizer xyz" in messages(gateway.tell(target_hello(501, tokenizer="xyz")), Refused)[0].reason


def test_a_target_with_another_plan_is_refused_while_requests_are_in_flight() -> None:
    gateway = GatewayBench()
    gateway.run_prompt(1, [1, 2, 3])
    gateway.answer([ok_row(1, 3, [4])])
    gateway.feed(ev.PeerLost("target", "process exited"))
    effects = gateway.tell(target_hello(501, plan="p2"))
    assert "plan p2 instead of p1" in messages(effects, Refused)[0].reason
    assert not messages(effects, Configure)
    gateway.feed(ev.Abort(1))
    assert messages(gateway.tell(target_hello(501, plan="p2")), Configure)


def test_a_target_with_another_plan_is_taken_when_no_token_was_committed() -> None:
    gateway = GatewayBench()
    gateway.submit(1, [1, 2, 3])
    gateway.feed(ev.PeerLost("target", "process exited"))
    assert messages(gateway.tell(target_hello(501, plan="p2")), Configure)


def test_a_region_that_could_not_be_made_ends_the_draft() -> None:
    gateway = GatewayBench()
    gateway.draft = DRAFT
    gateway.tell(draft_hello(DRAFT), "draft")
    effects = gateway.tell(DraftRegion(gateway.stamp, b"", error="no memory"))
    assert "no memory" in of(effects, ev.DraftLost)[0].reason


def test_a_failed_self_test_ends_the_draft_and_tells_the_target() -> None:
    gateway = GatewayBench()
    gateway.draft = DRAFT
    gateway.tell(draft_hello(DRAFT), "draft")
    gateway.tell(DraftRegion(gateway.stamp, b"manifest"))
    effects = gateway.tell(DraftReady(gateway.stamp, error="pattern"), "draft")
    assert messages(effects, DraftGone)[0].stamp.draft == DRAFT
    assert not gateway.gateway.draft_ready


def test_a_lost_target_is_replaced_only_after_the_draft_has_detached() -> None:
    gateway = GatewayBench(with_draft=True)
    effects = gateway.feed(ev.PeerLost("target", "process exited"))
    assert DRAFT in [message.incarnation for message in messages(effects, StartOver)]
    assert not messages(gateway.tell(target_hello(501)), Configure)
    assert messages(gateway.tell(draft_hello(DRAFT + 1), "draft"), Configure)


def test_a_draft_that_does_not_detach_is_given_up() -> None:
    gateway = GatewayBench(with_draft=True)
    gateway.feed(ev.PeerLost("target", "process exited"))
    gateway.tell(target_hello(501))
    gateway.now = 5.0
    gateway.tell(target_hello(501))
    assert messages(gateway.feed(ev.TimerFired("tick")), Configure)


def test_a_silent_target_is_lost_and_told_to_start_over() -> None:
    gateway = GatewayBench()
    effects = gateway.tick_until(5.0)
    assert "silent" in of(effects, ev.TargetLost)[0].reason
    assert messages(effects, StartOver)[0].incarnation == 500


def test_a_service_that_was_given_up_is_told_to_start_over_whatever_it_says() -> None:
    gateway = GatewayBench()
    gateway.feed(ev.PeerLost("target", "process exited"))
    for message in (target_hello(500), Heartbeat(gateway.gateway.epoch, 500, 3, False)):
        assert messages(gateway.tell(message), StartOver)[0].incarnation == 500


def test_a_silent_draft_is_lost_and_the_target_is_told() -> None:
    gateway = GatewayBench(with_draft=True)
    gateway.tick_until(4.5)
    gateway.tell(Heartbeat(gateway.gateway.epoch, 500, 0, False))
    effects = gateway.tick_until(5.0)
    assert messages(effects, DraftGone)[0].stamp.draft == DRAFT
    assert gateway.gateway.target_ready


def test_a_draft_whose_device_makes_no_progress_is_lost_though_it_speaks() -> None:
    gateway = GatewayBench(with_draft=True)
    for second in range(0, 61, 2):
        gateway.beat(rounds=3, busy=True)
        gateway.tell(Heartbeat(gateway.gateway.epoch, 500, 0, False))
        effects = gateway.tick_until(float(second))
    assert "finished no work" in of(effects, ev.DraftLost)[0].reason


def test_a_lost_draft_costs_no_round() -> None:
    gateway = GatewayBench(with_draft=True)
    gateway.run_prompt(1, [1, 2, 3])
    assert not messages(gateway.feed(ev.PeerLost("draft", "process exited")), Verify)
    assert messages(gateway.answer([ok_row(1, 3, [4])]), Verify)[0].k == 0


def test_a_verdict_that_names_a_lost_draft_says_again_that_it_is_gone() -> None:
    gateway = GatewayBench(with_draft=True)
    gateway.run_prompt(1, [1, 2, 3])
    gateway.feed(ev.PeerLost("draft", "process exited"))
    effects = gateway.answer([ok_row(1, 3, [4])])
    assert messages(effects, DraftGone) == [DraftGone(Stamp(gateway.gateway.epoch, 500, DRAFT))]


def crashed_with_two() -> GatewayBench:
    """Requests 1 and 2 were in the forward when the target died."""
    gateway = GatewayBench()
    gateway.run_prompt(1, [1])
    gateway.submit(2, [2])
    gateway.answer([ok_row(1, 1, [5])])
    gateway.answer([ok_row(1, 2, [6])], admitted=[AdmitAnswer(2, "ok", 2, 1, 0, 16)])
    gateway.feed(ev.PeerLost("target", "process exited"))
    return gateway


def test_after_a_crash_requests_are_replayed_from_their_logs_one_at_a_time() -> None:
    gateway = crashed_with_two()
    (verify,) = messages(gateway.serve(501), Verify)
    assert [(admit.request, admit.ids) for admit in verify.admits] == [(1, [1, 5, 6])]
    (verify,) = messages(gateway.answer(admitted=[AdmitAnswer(1, "ok", 1, 1, 0, 16)]), Verify)
    assert verify.admits == []
    (verify,) = messages(gateway.answer([ok_row(1, 3, [7])]), Verify)
    assert [admit.request for admit in verify.admits] == [2]
    assert [live.verify for live in verify.live] == [False]


def test_a_request_that_kills_the_target_three_times_at_one_point_fails_alone() -> None:
    gateway = crashed_with_two()
    failed: list[ev.Failed] = []
    for incarnation in (501, 502, 503):
        assert failed == []
        gateway.serve(incarnation)
        gateway.answer(admitted=[AdmitAnswer(1, "ok", 1, 1, 0, 16)])
        failed = of(gateway.feed(ev.PeerLost("target", "process exited")), ev.Failed)
    assert [(one.request, one.code) for one in failed] == [(1, "error")]
    (verify,) = messages(gateway.serve(504), Verify)
    assert [admit.request for admit in verify.admits] == [2]


def test_a_gateway_that_did_not_run_for_a_while_does_not_take_its_peers_for_silent() -> None:
    gateway = crashed_with_two()
    gateway.serve(501)
    gateway.now += 60.0
    assert of(gateway.feed(ev.TimerFired("tick")), ev.TargetLost) == []


def test_a_request_that_passed_a_round_alone_is_no_suspect_any_more() -> None:
    gateway = crashed_with_two()
    gateway.serve(501)
    gateway.answer(admitted=[AdmitAnswer(1, "ok", 1, 1, 0, 16)])
    assert gateway.gateway.requests.by_id[1].suspect
    gateway.answer([ok_row(1, 3, [7])])
    assert not gateway.gateway.requests.by_id[1].suspect
    assert gateway.gateway.requests.by_id[2].suspect


def test_requests_do_not_wait_for_a_target_for_ever() -> None:
    gateway = crashed_with_two()
    gateway.now = 121.0
    effects = gateway.feed(ev.TimerFired("tick"))
    assert sorted(failed.request for failed in of(effects, ev.Failed)) == [1, 2]
