"""Text of an answer, token by token: whole characters, hidden special tokens, stop conditions."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.model.tokenizer import load_tokenizer
from services.gateway.text import FinishReason, TextStream

EOS, SPECIAL, UNKNOWN = 1000, 1001, 1002
LENGTH = FinishReason("length")


class Bytes:
    """A vocabulary whose ids 0 … 255 are single bytes, 256 … are the given pieces."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + list(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in (EOS, SPECIAL):
            return b"<special>"
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in (EOS, SPECIAL)


def stream(pieces: Sequence[bytes] = (), **options: object) -> TextStream:
    defaults = {"stop": (), "stop_token_ids": (), "eos_ids": {EOS}, "ignore_eos": False, "max_tokens": 1000}
    return TextStream(Bytes(pieces), **(defaults | options))


def run(text: TextStream, ids: Sequence[int]) -> tuple[list[str], FinishReason | None]:
    """What each token made safe, to the end or until the ids are used up."""
    parts = []
    for token_id in ids:
        reason = text.push(token_id)
        parts.append(text.take())
        if reason is not None:
            return parts, reason
    return parts, None


def pieces_run(pieces: Sequence[str | bytes], **options: object) -> tuple[list[str], FinishReason | None]:
    encoded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return run(stream(encoded, **options), range(256, 256 + len(encoded)))


@pytest.mark.parametrize("text", ["é", "日本語", "🙂", "👩‍👩‍👧", "a🙂b"])
def test_a_character_appears_when_its_last_byte_has_come(text: str) -> None:
    parts, reason = run(stream(), text.encode())
    assert reason is None
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)


def test_half_a_character_is_replaced_only_at_the_end() -> None:
    text = stream(max_tokens=3)
    assert run(text, "🙂".encode()[:3]) == (["", "", "\ufffd"], LENGTH)
    text = stream()
    assert run(text, "日".encode()[:2]) == (["", ""], None)
    text.finish()
    assert text.take() == "\ufffd"


def test_bytes_that_can_never_be_a_character_are_replaced_at_once() -> None:
    assert run(stream(), [0x41, 0xFF, 0xE6, 0x42, 0x80]) == (["A", "\ufffd", "", "\ufffdB", "\ufffd"], None)


def test_special_tokens_are_no_part_of_the_text() -> None:
    assert pieces_run(["a", "b"], max_tokens=2) == (["a", "b"], LENGTH)
    assert run(stream(), [0x61, SPECIAL, 0x62, UNKNOWN]) == (["a", "", "b", ""], None)
    assert run(stream(), [0xC3, SPECIAL, 0xA9]) == (["", "", "é"], None)


def test_eos_ends_and_is_not_shown() -> None:
    assert run(stream(), [0x61, EOS]) == (["a", ""], FinishReason("stop"))


def test_ignore_eos_goes_on_but_a_stop_token_id_still_ends() -> None:
    assert run(stream(ignore_eos=True), [EOS, 0x61]) == (["", "a"], None)
    ended = run(stream(ignore_eos=True, stop_token_ids=[EOS]), [0x61, EOS])
    assert ended == (["a", ""], FinishReason("stop", EOS))


def test_a_stop_token_id_ends_without_its_text() -> None:
    assert run(stream(stop_token_ids=[0x63]), b"abc") == (["a", "b", ""], FinishReason("stop", 0x63))


def test_max_tokens_counts_every_token() -> None:
    assert run(stream(max_tokens=3), [0x61, SPECIAL, 0x62]) == (["a", "", "b"], LENGTH)


def test_a_stop_at_the_last_token_beats_length() -> None:
    assert run(stream(max_tokens=2), [0x61, EOS])[1] == FinishReason("stop")
    assert run(stream(max_tokens=2, stop_token_ids=[0x62]), b"ab")[1] == FinishReason("stop", 0x62)
    assert run(stream(max_tokens=2, stop=["b"]), b"ab")[1] == FinishReason("stop", "b")


STOP_TABLE = [
    # stop strings, pieces, text that each piece makes safe, the stop that matched
    (["\n\n"], ["a\n", "\nb"], ["a", ""], "\n\n"),
    (["END"], ["E", "N", "D", "x"], ["", "", ""], "END"),
    (["END"], ["xE", "N", "dy"], ["x", "", "ENdy"], None),
    (["END"], ["ENEND"], ["EN"], "END"),
    (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
    (["stop", "top"], ["xstopy"], ["x"], "stop"),
    (["top", "stop"], ["xs", "to", "p"], ["x", "", ""], "stop"),
    (["abc", "b"], ["abc"], ["a"], "b"),
    (["bc", "abcd"], ["a", "b", "c", "d"], ["", "", "a"], "bc"),
    (["late", "early"], ["an early and a late"], ["an "], "early"),
    (["本語"], ["日本", "語"], ["日", ""], "本語"),
    (["\u200d"], ["👩‍👩"], ["👩"], "\u200d"),
    (["é"], [b"a\xc3", b"\xa9b"], ["a", ""], "é"),
    (["<special>"], ["<spec", "ial>"], ["", ""], "<special>"),
]


@pytest.mark.parametrize(("stop", "pieces", "parts", "matched"), STOP_TABLE)
def test_stop_strings_across_token_borders(
    stop: list[str], pieces: list[str | bytes], parts: list[str], matched: str | None
) -> None:
    expected = None if matched is None else FinishReason("stop", matched)
    assert pieces_run(pieces, stop=stop) == (parts, expected)


def test_text_held_for_a_stop_string_comes_out_at_every_other_end() -> None:
    for last, options, reason in (
        (EOS, {}, FinishReason("stop")),
        (0x7A, {"stop_token_ids": [0x7A]}, FinishReason("stop", 0x7A)),
        (SPECIAL, {"max_tokens": 4}, LENGTH),
    ):
        assert run(stream(stop=["END"], **options), [*b"aEN", last]) == (["a", "", "", "EN"], reason)
    text = stream(stop=["END"])
    run(text, b"aEN")
    text.finish()
    text.finish()
    assert text.take() == "EN"
    assert text.take() == ""


def test_a_special_tokens_name_is_not_a_stop_string() -> None:
    assert run(stream(stop=["<special>"]), [0x61, SPECIAL, 0x62]) == (["a", "", "b"], None)


def test_no_token_is_taken_after_the_end() -> None:
    text = stream(max_tokens=1)
    text.push(0x61)
    with pytest.raises(RuntimeError, match="token 98 came after the end"):
        text.push(0x62)


def test_a_real_vocabulary_streams_the_text_that_it_decodes(demo_gguf: Path) -> None:
    tokenizer = load_tokenizer(demo_gguf)
    said = "Numbers 1, 22 and 333. 日本語のテキスト 👩‍👩‍👧‍👦 naïve\n\n  done"
    ids = [1, *tokenizer.encode(said, add_special=False), 2, 17]
    text = TextStream(
        tokenizer,
        stop=["never"],
        stop_token_ids=(),
        eos_ids=tokenizer.eos_ids,
        ignore_eos=False,
        max_tokens=1000,
    )
    parts, reason = run(text, ids)
    assert ("".join(parts), reason) == (said, FinishReason("stop"))
    assert len(parts) == len(ids) - 1
    assert not any("\ufffd" in part for part in parts)


def cut_by_definition(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


alphabet = st.sampled_from("ab\né日🙂\u200d")
raw = st.one_of(st.text(alphabet, max_size=24).map(str.encode), st.binary(max_size=12))
stops = st.lists(st.text(st.sampled_from("ab\né日\ufffd"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=800, deadline=None, derandomize=True)
@given(raw, stops, st.lists(st.integers(0, 24), max_size=8))
@example(b"ab\xe6", ["b\ufffd"], [1])
def test_the_text_does_not_depend_on_how_bytes_are_cut_into_tokens(
    data: bytes, stop: list[str], cuts: list[int]
) -> None:
    borders = sorted({cut for cut in cuts if cut < len(data)} | {0, len(data)})
    pieces = [data[a:b] for a, b in pairwise(borders)]
    text = stream(pieces, stop=stop)
    parts, reason = run(text, range(256, 256 + len(pieces)))
    if reason is None:
        text.finish()
        parts.append(text.take())
    expected, matched = cut_by_definition(data.decode("utf-8", "replace"), stop)
    assert "".join(parts) == expected
    if matched is None or reason is not None:
        assert (reason and reason.stop_reason) == matched


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0x61, 0x62, 0x0A, 0xC3, 0xA9, EOS, SPECIAL, 0x7A]), max_size=12),
    stops,
    st.integers(1, 12),
)
def test_the_earliest_event_of_a_run_wins(ids: list[int], stop: list[str], max_tokens: int) -> None:
    """The same run, ended by each rule alone: the one that ends first is the one that ends all together."""
    everything = {"stop": stop, "stop_token_ids": [0x7A], "max_tokens": max_tokens}
    alone = [
        {"ignore_eos": False, "stop_token_ids": []},
        {"stop_token_ids": [0x7A]},
        {"stop": stop},
        {"max_tokens": max_tokens},
    ]

    def ended_at(options: dict[str, object]) -> tuple[int, FinishReason | None]:
        parts, reason = run(stream(**({"ignore_eos": True} | options)), ids)
        return (len(parts) if reason else 10**6), reason

    first = min((ended_at(options) for options in alone), key=lambda end: end[0])
    length, reason = ended_at({"ignore_eos": False} | everything)
    assert length == first[0]
    if length < 10**6 and reason.reason == "length":
        assert length == max_tokens
