"""A request's way to its client, without a socket: merging, terminal messages, attribution."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq_harness import ByteTokenizer

from paceline import wire
from services.gateway.admission import RequestError
from services.gateway.engine import Chunk, Final
from services.gateway.text import TextStream
from services.gateway.zmq.attribution import Attribution, spans
from services.gateway.zmq.stream import Stream

EOS = 257
FINAL = Final("length", None, 1, 2, 0, 0.0, 0.0, 0.0)
FAILURE = RequestError(500, "generation_failed", "no")


def chunk_of(text: str, drafted: int = 0) -> Chunk:
    ids = tuple(text.encode())
    return Chunk(ids, text, tuple(j < len(ids) - 1 for j in range(len(ids))), drafted, len(ids) - 1)


def stream_with(credit: int) -> tuple[Stream, list[wire.Message]]:
    sent: list[wire.Message] = []
    return Stream(1, credit, ByteTokenizer(), sent.append), sent


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_what_is_held_comes_before_the_end_and_nothing_after(end):
    stream, sent = stream_with(credit=1)
    for text in ("ab", "cd", "ef"):
        stream.offer(chunk_of(text, drafted=4))
    if end == "finish":
        stream.finish(FINAL, seed=0)
    else:
        stream.fail(FAILURE)
    stream.fail(FAILURE)
    stream.finish(FINAL, seed=0)
    stream.offer(chunk_of("gh"))
    stream.grant(5)
    assert [type(message).__name__ for message in sent] == [
        "Chunk",
        "Chunk",
        "Final" if end == "finish" else "Error",
    ]
    merged = sent[1]
    assert (merged.text, merged.steps, merged.drafted, merged.accepted) == ("cdef", 2, 8, 2)
    assert merged.spans == [0, 1, 1, 1, 1]


def test_credit_is_bounded():
    stream, sent = stream_with(credit=10**9)
    stream.grant(10**9)
    stream.grant(-(10**9))
    for _ in range(wire.MAX_CREDIT + 3):
        stream.offer(chunk_of("x"))
    assert len(sent) == wire.MAX_CREDIT


@pytest.mark.parametrize("granted", [0, 5])
def test_the_first_credit_is_bounded_like_every_other(granted):
    """The front's queue has room for MAX_CREDIT chunks of a stream, whatever its Generate asked for."""
    stream, sent = stream_with(credit=wire.MAX_CREDIT + 7)
    for _ in range(wire.MAX_CREDIT):
        stream.offer(chunk_of("x"))
    stream.grant(granted)
    for _ in range(wire.MAX_CREDIT):
        stream.offer(chunk_of("x"))
    assert len(sent) == wire.MAX_CREDIT + granted


def test_credit_cannot_be_taken_back():
    stream, sent = stream_with(credit=2)
    stream.grant(-2)
    stream.offer(chunk_of("x"))
    assert len(sent) == 1


def test_a_client_always_gets_a_first_chunk():
    stream, sent = stream_with(credit=-5)
    stream.offer(chunk_of("x"))
    assert len(sent) == 1


def test_spans_start_with_what_is_not_from_the_draft():
    assert spans([]) == []
    assert spans([False]) == [1]
    assert spans([True, True, False]) == [0, 2, 1]


def test_a_character_belongs_to_the_token_that_completed_it():
    attribution = Attribution(ByteTokenizer())
    assert attribution.flags(Chunk((0xC3,), "", (False,), 0, 0)) == []
    assert attribution.flags(Chunk((0xA9, 0x61), "éa", (True, False), 1, 1)) == [True, False]


def test_text_that_was_held_back_keeps_its_origin():
    attribution = Attribution(ByteTokenizer())
    assert attribution.flags(Chunk(tuple(b"abc"), "a", (True, True, False), 4, 2)) == [True]
    assert attribution.flags(Chunk(tuple(b"d"), "bcd", (False,), 4, 0)) == [True, False, False]


def test_a_token_of_several_characters_may_be_released_in_parts():
    class Words(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return (b"draft", b"target")[token_id]

    attribution = Attribution(Words())
    assert attribution.flags(Chunk((0,), "dr", (True,), 1, 1)) == [True, True]
    assert attribution.flags(Chunk((1,), "afttar", (False,), 0, 0)) == [True] * 3 + [False] * 3


def test_special_tokens_have_no_characters():
    attribution = Attribution(ByteTokenizer())
    assert attribution.flags(Chunk((EOS, 0x61), "a", (True, False), 1, 1)) == [False]


@given(
    st.text(max_size=30),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.text(min_size=1, max_size=3), max_size=2),
)
def test_attribution_follows_the_text_stream_whatever_the_steps(text, flags, sizes, stop):
    tokenizer = ByteTokenizer()
    ids = [*text.encode(), EOS]
    origin = [flags[index % len(flags)] for index in range(len(ids))]
    expected = flags_of_last_bytes(text, origin)
    released = TextStream(
        tokenizer, stop=stop, stop_token_ids=(), eos_ids=(EOS,), ignore_eos=False, max_tokens=1000
    )
    attribution = Attribution(tokenizer)
    got: list[bool] = []
    shown = ""
    start, step, ended = 0, 0, False
    while not ended:
        size = sizes[step % len(sizes)]
        taken = 0
        for token_id in ids[start : start + size]:
            taken += 1
            ended = released.push(token_id) is not None
            if ended:
                break
        part = released.take()
        shown += part
        got += attribution.flags(
            Chunk(tuple(ids[start : start + taken]), part, tuple(origin[start : start + taken]), 0, 0)
        )
        start, step = start + taken, step + 1
    assert text.startswith(shown)
    assert got == expected[: len(shown)]


def flags_of_last_bytes(text: str, origin: list[bool]) -> list[bool]:
    ends = accumulate(len(character.encode()) for character in text)
    return [origin[end - 1] for end in ends]
