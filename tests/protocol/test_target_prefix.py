"""Rules of the target's prefix cache: what a newcomer finds, and what is never written again."""

from protocol_harness import GREEDY, TargetBench, decode_row, messages, of

from common.messages.rounds import Admit, AdmitAnswer, Commit, LiveRow, Proposal, Verdict, VerdictRow
from services.target import events as ev

PROMPT = list(range(1, 11))


def chunk_row(answer: AdmitAnswer, ids: list[int], start: int, end: int) -> LiveRow:
    return LiveRow(answer.request, answer.slot, answer.generation, Commit(len(ids), []), start, end, False)


def prefilled(ids: list[int] = PROMPT, **bench: object) -> tuple[TargetBench, AdmitAnswer]:
    """A slot with the KV of all but the last id, in pages of four positions."""
    target = TargetBench(**bench)
    answer = target.admit(1, ids)
    target.execute(target.tell(target.verify([chunk_row(answer, ids, 0, len(ids) - 1)])), {})
    return target, answer


def first_row(effects: list) -> VerdictRow:
    return messages(effects, Verdict)[0].rows[0]


def released(**bench: object) -> TargetBench:
    target, _ = prefilled(**bench)
    target.tell(target.verify())
    return target


def test_a_log_that_begins_like_one_that_ended_starts_behind_the_full_pages() -> None:
    target = released()
    answer = target.admit(2, [*PROMPT, 77])
    assert (answer.status, answer.cached) == ("ok", 8)
    work = of(target.tell(target.verify([chunk_row(answer, [*PROMPT, 77], 8, 10)])), ev.Run)[0].work
    assert (work.chunks[0].start, work.chunks[0].ids) == (8, (9, 10))


def test_a_log_that_begins_like_one_that_runs_shares_its_pages() -> None:
    target, first = prefilled()
    second = target.admit(2, PROMPT)
    slots = target.link.slots
    assert second.cached == 8
    assert slots.live[second.slot].pages[:2] == slots.live[first.slot].pages[:2]
    assert slots.live[second.slot].pages[2] != slots.live[first.slot].pages[2]


def test_the_page_of_the_bonus_token_is_never_shared() -> None:
    target = released(ids=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert target.admit(2, [1, 2, 3, 4, 5, 6, 7, 8]).cached == 4
    assert target.admit(3, [1, 2, 3, 4, 5, 6, 7, 8, 9]).cached == 8


def test_pages_of_generated_ids_are_found_once_they_are_committed() -> None:
    target, answer = prefilled()
    target.execute(target.tell(target.verify([decode_row(answer, [], 10)])), {answer.slot: (11, 12, 13)})
    assert target.admit(2, [*range(1, 14), 99]).cached == 8
    target, answer = prefilled()
    target.execute(target.tell(target.verify([decode_row(answer, [], 10)])), {answer.slot: (11, 12, 13)})
    target.execute(target.tell(target.verify([decode_row(answer, [11, 12, 13], 10)])), {answer.slot: (14,)})
    assert target.admit(2, [*range(1, 14), 99]).cached == 12


def test_pages_of_drafts_that_were_not_committed_are_not_found() -> None:
    target, answer = prefilled()
    target.execute(target.tell(target.verify([decode_row(answer, [], 10)])), {answer.slot: (11, 12, 13)})
    target.tell(target.verify())
    assert target.admit(2, [*range(1, 14), 99]).cached == 8


def test_pages_of_a_forward_that_failed_are_not_found() -> None:
    target = TargetBench()
    answer = target.admit(1, PROMPT)
    target.execute(target.tell(target.verify([chunk_row(answer, PROMPT, 0, 9)])), {}, error="bad kernel")
    target.tell(target.verify())
    assert target.admit(2, PROMPT).cached == 0


def test_a_chunk_that_would_write_to_a_settled_page_is_a_gap_and_says_where_to_go_on() -> None:
    target, answer = prefilled()
    verdict_row = first_row(target.tell(target.verify([chunk_row(answer, PROMPT, 4, 9)])))
    assert (verdict_row.status, verdict_row.kv) == ("gap", 9)
    second = target.admit(2, PROMPT)
    verdict_row = messages(
        target.tell(target.verify([chunk_row(answer, PROMPT, 0, 0), chunk_row(second, PROMPT, 0, 9)])),
        Verdict,
    )[0].rows[1]
    assert (verdict_row.status, verdict_row.kv) == ("gap", 8)


def test_a_log_that_is_known_to_its_bonus_token_is_verified_at_once() -> None:
    target = released()
    ids = PROMPT[:9]
    answer = target.admit(2, ids)
    effects = target.execute(target.tell(target.verify([decode_row(answer, [], 9)])), {answer.slot: (10,)})
    assert (answer.cached, first_row(effects).ids) == (8, [10])


def test_known_pages_count_as_free_and_are_given_out_to_a_newcomer() -> None:
    target = released(pages=5)
    assert messages(target.tell(target.verify()), Verdict)[0].free_pages == 4
    assert target.link.slots.pool.free == 2
    answer = target.admit(2, [50] * 12)
    assert (answer.status, answer.cached, answer.allocated) == ("ok", 0, 16)


def test_a_newcomer_that_finds_no_room_keeps_no_page() -> None:
    target, answer = prefilled(pages=6)
    ids = [*PROMPT, *range(11, 20)]
    assert target.admit(2, ids).status == "no_room"
    slots = target.link.slots
    assert [slots.pool.references(page) for page in slots.live[answer.slot].pages] == [2, 2, 1, 1]
    target.tell(target.verify())
    assert slots.cache.available == 5


def test_a_newcomer_that_finds_no_slot_keeps_no_page() -> None:
    target, _ = prefilled(pages=200)
    admits = [Admit(request, PROMPT, GREEDY) for request in range(2, 11)]
    live = [
        LiveRow(one.request, one.slot, one.generation, Commit(len(one.ids), []), 0, 0, False)
        for one in target.link.slots.live.values()
    ]
    verdict = messages(target.tell(target.verify(live, admits=admits)), Verdict)[0]
    assert [one.status for one in verdict.admitted][-2:] == ["no_slot", "no_slot"]
    target.tell(target.verify())
    assert target.link.slots.cache.available == 199


def test_pages_that_wait_for_the_draft_are_found_but_not_given_out() -> None:
    target, _ = prefilled(with_draft=True, pages=6)
    target.tell(target.verify())
    assert (target.link.slots.retiring_pages, target.link.slots.cache.available) == (4, 1)
    assert target.admit(2, [50] * 6).status == "no_room"
    assert target.admit(3, PROMPT[:9]).cached == 8
    assert target.admit(4, [50]).status == "no_room"
    target.tell(Proposal(target.stamp, 0, target.round, target.round - 1, []))
    assert target.link.slots.cache.available == 2
