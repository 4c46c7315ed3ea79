"""Rules of the side channel: when the target writes hidden rows, what its verdict says of them, and how the
draft reads them once and says so."""

from msgspec.structs import replace
from protocol_harness import (
    DRAFT,
    DraftBench,
    GatewayBench,
    TargetBench,
    decode_row,
    messages,
    of,
    propose_row,
)

from common.messages.lifecycle import DraftGone, JoinDraft
from common.messages.rounds import AdmitAnswer, Consumed, Proposal, Verdict, VerdictRow, Verify
from services.draft import events as dev
from services.draft.work import DraftResult, DraftWork, HiddenRows, Tree
from services.target import events as tev
from services.target.work import Capture, RoundResult, RoundWork, TreeResult, hidden_spans

LAYERS = [1, 2]


class HiddenTarget(TargetBench):
    """A target with one prompt computed in slot `answer.slot`, and a draft that reads hidden rows."""

    def __init__(self, layers: list[int] = LAYERS) -> None:
        super().__init__(pages=20)
        self.layers = layers
        self.join(DRAFT)
        self.answer = self.admit(1, [1, 2, 3, 4, 5])
        self.log = [1, 2, 3, 4, 5]

    def join(self, draft: int) -> None:
        self.draft = draft
        self.tell(JoinDraft(self.stamp, 1, self.layers, 8))
        self.feed(tev.RegionReady(draft, b"manifest"))
        self.feed(tev.RegionTested(draft, 5, True))

    def begin(self, new: tuple[int, ...] = (), chunk=(0, 0), capture: bool = True) -> RoundWork:
        """The work of a round that commits new and verifies the bonus token."""
        row = decode_row(self.answer, list(new), len(self.log), chunk)
        self.log += new
        self.asked = replace(self.verify([row]), capture=capture)
        return of(self.tell(self.asked), tev.Run)[0].work

    def end(self, work: RoundWork, ids: tuple[int, ...], error: str = "") -> Verdict:
        trees = (TreeResult(self.answer.slot, ids),)
        hidden = hidden_spans(work, trees) if work.capture and not error else ()
        result = RoundResult(0, work.round, () if error else trees, 10, error, hidden)
        return messages(self.feed(tev.Executed(result)), Verdict)[0]


def test_rows_are_captured_in_the_block_of_group_and_parity() -> None:
    target = HiddenTarget()
    work = target.begin(chunk=(0, 4))
    assert work.capture == Capture(DRAFT, target.round % 2, tuple(LAYERS))
    assert target.end(work, (6,)).hidden == "rows"
    assert target.begin((6,)).capture == Capture(DRAFT, target.round % 2, tuple(LAYERS))


def test_the_verdict_says_where_chunk_root_and_accepted_path_lie() -> None:
    target = HiddenTarget()
    row = target.end(target.begin(chunk=(0, 4)), (6, 7, 8)).rows[0]
    assert (row.hidden_first, row.hidden_count, row.kv) == (0, 4 + 1 + 2, 7)


def test_nothing_is_captured_unless_the_call_asks() -> None:
    target = HiddenTarget()
    assert target.begin(chunk=(0, 4), capture=False).capture is None


def test_nothing_is_captured_for_a_draft_that_reads_no_rows() -> None:
    target = HiddenTarget(layers=[])
    work = target.begin(chunk=(0, 4))
    assert work.capture is None
    verdict = target.end(work, (6,))
    assert (verdict.hidden, verdict.rows[0].hidden_count) == ("none", 0)


def test_a_failed_forward_leaves_no_rows_and_its_block_free() -> None:
    target = HiddenTarget()
    verdict = target.end(target.begin(chunk=(0, 4)), (), error="out of luck")
    assert (verdict.hidden, verdict.rows[0].hidden_count) == ("no_rows", 0)
    for _ in range(2):
        assert target.begin(chunk=(0, 4)).capture is not None
        target.end(of_round(target), (), error="again")


def of_round(target: HiddenTarget) -> RoundWork:
    return RoundWork(0, target.round, (), ())


def test_a_block_is_not_written_again_before_it_is_consumed() -> None:
    target = HiddenTarget()
    written = target.round + 1
    target.end(target.begin(chunk=(0, 4)), (6,))
    target.end(target.begin((6,)), (7,))
    work = target.begin((7,))
    assert work.capture is None
    verdict = target.end(work, (8,))
    assert (verdict.hidden, verdict.rows[0].hidden_count) == ("no_rows", 0)
    target.tell(Consumed(target.stamp, 0, written))
    assert target.begin((8,)).capture is None
    target.end(of_round(target), (9,))
    assert target.begin((9,)).capture is not None


def test_consumed_speaks_for_every_round_before_it_and_for_its_group_alone() -> None:
    target = HiddenTarget()
    target.end(target.begin(chunk=(0, 4)), (6,))
    target.end(target.begin((6,)), (7,))
    target.tell(Consumed(target.stamp, 1, target.round))
    assert target.begin((7,)).capture is None
    target.end(of_round(target), (8,))
    target.tell(Consumed(target.stamp, 0, target.round))
    assert target.begin((8,)).capture is not None


def test_a_consumed_of_rounds_that_never_were_is_ignored() -> None:
    target = HiddenTarget()
    target.end(target.begin(chunk=(0, 4)), (6,))
    target.end(target.begin((6,)), (7,))
    target.tell(Consumed(target.stamp, 0, target.round + 1))
    assert target.link.counters["bad:Consumed"] == 1
    assert target.begin((7,)).capture is None


def test_blocks_are_free_when_the_draft_is_gone_and_another_joins() -> None:
    target = HiddenTarget()
    target.end(target.begin(chunk=(0, 4)), (6,))
    target.end(target.begin((6,)), (7,))
    target.tell(DraftGone(target.stamp))
    target.join(DRAFT + 1)
    assert target.begin((7,)).capture == Capture(DRAFT + 1, target.round % 2, tuple(LAYERS))


def test_rows_for_a_draft_that_went_while_they_were_computed_are_not_announced() -> None:
    target = HiddenTarget()
    work = target.begin(chunk=(0, 4))
    target.tell(DraftGone(target.stamp))
    target.join(DRAFT + 1)
    verdict = target.end(work, (6,))
    assert (verdict.hidden, verdict.rows[0].hidden_count) == ("no_rows", 0)


def test_a_consumed_of_another_draft_is_dropped() -> None:
    target = HiddenTarget()
    stamp = replace(target.stamp, draft=DRAFT + 1)
    assert target.tell(Consumed(stamp, 0, target.round)) == []
    assert target.link.counters["stale:Consumed"] == 1


# The draft


def hidden_draft() -> DraftBench:
    """Round 1 was proposed for a log of three ids without anything to draft from."""
    draft = DraftBench(capture=LAYERS, hidden_row_bytes=8)
    finish(draft, draft.propose(1, [propose_row([1, 2, 3])]))
    return draft


def work_of(effects: list) -> DraftWork:
    return of(effects, dev.Run)[0].work


def finish(draft: DraftBench, effects: list, guesses: tuple[int, ...] = (), error: str = "") -> list:
    work = work_of(effects)
    trees = tuple(
        Tree(row.slot, (row.ids[-1], *guesses), tuple(range(-1, len(guesses))))
        for row in work.rows
        if row.k and guesses
    )
    return draft.feed(dev.Executed(DraftResult(0, work.round, trees, error)))


def accepted(base: int, ids: list[int], first: int, count: int, request: int = 1) -> VerdictRow:
    kv = base + len(ids) - 1
    return VerdictRow(request, 3, 1, "ok", base, kv, 30, ids, 3, len(ids) - 1, first, count)


def test_rows_of_a_verdict_are_given_with_the_ids_that_it_announces() -> None:
    draft = hidden_draft()
    row = work_of(draft.verdict(1, [accepted(3, [4, 5], 7, 4)], "rows")).rows[0]
    assert row.ids == (1, 2, 3, 4, 5)
    assert row.hidden == (HiddenRows(1, 1, 7, 4, 0),)


def test_rows_are_given_once_and_consumed_when_the_work_ends() -> None:
    draft = hidden_draft()
    effects = draft.verdict(1, [accepted(3, [4], 0, 1)], "rows")
    assert not messages(effects, Consumed)
    assert messages(finish(draft, effects, (5,)), Consumed) == [Consumed(draft.stamp, 0, 1)]
    effects = draft.propose(2, [propose_row([4], 3)])
    assert not of(effects, dev.Run)
    assert work_of(draft.verdict(2, [accepted(4, [6], 0, 1)], "rows")).rows[0].hidden == (
        HiddenRows(0, 2, 0, 1, 3),
    )


def test_failed_work_has_consumed_its_rows_too() -> None:
    draft = hidden_draft()
    effects = draft.verdict(1, [accepted(3, [4], 0, 1)], "rows")
    assert messages(finish(draft, effects, error="out of luck"), Consumed) == [Consumed(draft.stamp, 0, 1)]


def test_a_block_without_rows_for_a_slot_that_lives_is_consumed_at_once() -> None:
    draft = hidden_draft()
    effects = draft.verdict(1, [accepted(3, [4], 0, 1, request=9)], "rows")
    assert messages(effects, Consumed) == [Consumed(draft.stamp, 0, 1)]
    assert not of(effects, dev.Run)


def test_rows_of_a_verdict_that_comes_after_its_commit_are_used_as_far_as_the_ids_agree() -> None:
    for committed, count in (([4, 5], 2), ([4, 9], 1), ([9], 0)):
        draft = hidden_draft()
        draft.propose(2, [propose_row(committed, 3)])
        row = work_of(draft.verdict(1, [accepted(3, [4, 5], 0, 2)], "rows")).rows[0]
        assert row.ids == (1, 2, 3, *committed)
        assert row.hidden == ((HiddenRows(1, 1, 0, count, 2),) if count else ())


def test_a_late_verdict_for_slots_that_are_gone_is_consumed() -> None:
    draft = hidden_draft()
    effects = draft.propose(3, [propose_row([7], request=2)])
    assert messages(draft.verdict(1, [accepted(3, [4], 0, 1)], "rows"), Consumed) == []
    effects = finish(draft, effects)
    assert messages(effects, Consumed) == [Consumed(draft.stamp, 0, 1)]
    assert not of(effects, dev.Run)


def test_a_verdict_without_rows_is_counted_and_answered_so_that_a_lost_consumed_does_no_harm() -> None:
    draft = hidden_draft()
    assert messages(draft.verdict(1, [accepted(3, [4], 0, 0)], "no_rows"), Consumed) == [
        Consumed(draft.stamp, 0, 1)
    ]
    assert draft.link.counters["no_rows"] == 1


def test_consumed_is_not_repeated_while_rows_are_being_read() -> None:
    draft = hidden_draft()
    draft.verdict(1, [accepted(3, [4], 0, 1)], "rows")
    draft.propose(2, [propose_row([4], 3)])
    assert not messages(draft.verdict(2, [accepted(4, [5], 0, 0)], "no_rows"), Consumed)


def test_rows_past_a_commit_that_stops_early_are_not_used() -> None:
    draft = hidden_draft()
    busy = draft.propose(2, [propose_row([], 3)])
    draft.now += 1
    busy = draft.feed(dev.TimerFired("join:0"))
    assert work_of(busy)
    draft.verdict(1, [accepted(3, [4, 5, 6], 0, 3)], "rows")
    draft.propose(3, [propose_row([4, 9], 3)])
    row = work_of(finish(draft, busy)).rows[0]
    assert row.ids == (1, 2, 3, 4, 9)
    assert row.hidden == (HiddenRows(1, 1, 0, 2, 2),)


def test_rows_wait_for_a_device_that_is_busy_and_are_read_then() -> None:
    draft = hidden_draft()
    busy = draft.propose(2, [propose_row([], 3)])
    draft.now += 1
    busy = draft.feed(dev.TimerFired("join:0"))
    effects = draft.verdict(1, [accepted(3, [4], 0, 1)], "rows")
    assert not messages(effects, Consumed)
    effects = finish(draft, busy)
    assert not messages(effects, Consumed)
    assert work_of(effects).rows[0].hidden == (HiddenRows(1, 1, 0, 1, 2),)
    assert messages(finish(draft, effects), Consumed) == [Consumed(draft.stamp, 0, 1)]


def test_a_propose_waits_for_rows_that_are_being_read_and_is_drafted_for() -> None:
    draft = DraftBench(capture=LAYERS, hidden_row_bytes=8)
    draft.propose(1, [propose_row([1, 2, 3], draft=False)], k=0)
    reading = draft.verdict(1, [VerdictRow(1, 3, 1, "prefilled", 3, 2, 30, [], 0, 0, 0, 2)], "rows")
    assert work_of(reading).rows[0].hidden == (HiddenRows(1, 1, 0, 2, 0),)
    assert not messages(draft.propose(2, [propose_row([], 3)]), Proposal)
    effects = finish(draft, reading)
    assert work_of(effects).rows[0].k == 3
    assert messages(finish(draft, effects, (4, 5)), Proposal)[0].rows[0].tokens == [3, 4, 5]


def test_a_prompt_is_read_chunk_by_chunk_while_nothing_is_drafted() -> None:
    draft = DraftBench(capture=LAYERS, hidden_row_bytes=8)
    draft.propose(1, [propose_row([1, 2, 3, 4, 5], draft=False)], k=0)
    chunk = VerdictRow(1, 3, 1, "prefilled", 5, 2, 30, [], 0, 0, 0, 2)
    effects = draft.verdict(1, [chunk], "rows")
    assert work_of(effects).rows[0].hidden == (HiddenRows(1, 1, 0, 2, 0),)
    assert messages(finish(draft, effects), Consumed) == [Consumed(draft.stamp, 0, 1)]


# The gateway


def test_the_gateway_asks_for_rows_only_with_a_draft_that_reads_them() -> None:
    for capture in ([], LAYERS):
        gateway = GatewayBench()
        gateway.join(DRAFT, capture=capture, hidden_row_bytes=8)
        gateway.submit(1, [1, 2, 3])
        effects = gateway.answer(admitted=[admitted(1)])
        assert messages(effects, Verify)[0].capture == bool(capture)


def test_the_gateway_says_what_the_draft_reads_when_it_joins() -> None:
    gateway = GatewayBench()
    effects = gateway.join(DRAFT, capture=LAYERS, hidden_row_bytes=8)
    assert messages(effects, JoinDraft) == [JoinDraft(gateway.stamp, 1, LAYERS, 8)]


def admitted(request: int) -> AdmitAnswer:
    return AdmitAnswer(request, "ok", request, 1, 0, 16)


def test_the_gateway_counts_what_became_of_the_rows() -> None:
    gateway = GatewayBench()
    gateway.join(DRAFT, capture=LAYERS, hidden_row_bytes=8)
    gateway.submit(1, [1, 2, 3])
    gateway.rounds[0] += 1
    verdict = gateway.verdict(admitted=[admitted(1)])
    gateway.tell(replace(verdict, hidden="no_rows"))
    gateway.tell(replace(verdict, hidden="no_rows"))
    assert gateway.gateway.usage.hidden_rounds == {"no_rows": 1}
