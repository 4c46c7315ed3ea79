import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.actors import frames
from common.actors.frames import BadFrames, Body, Kind

HEAD_7 = bytes([7, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("body", "golden"),
    [
        (Body(Kind.TOLD, 0, b"payload"), [b"payload"]),
        (Body(Kind.QUESTION, 7, b"payload"), [b"Q" + HEAD_7, b"payload"]),
        (Body(Kind.ANSWER, 7, b"payload"), [b"A" + HEAD_7, b"payload"]),
        (Body(Kind.FAILURE, 2**64 - 1, b"reason"), [b"F" + b"\xff" * 8, b"reason"]),
    ],
)
def test_frames_have_these_bytes(body: Body, golden: list[bytes]) -> None:
    assert frames.pack(body) == golden
    assert frames.parse(golden) == body


@given(st.lists(st.binary(max_size=12), max_size=4))
def test_any_frames_are_a_body_that_packs_to_them_or_are_refused(received: list[bytes]) -> None:
    try:
        body = frames.parse(received)
    except BadFrames:
        return
    assert frames.pack(body) == received


@pytest.mark.parametrize(
    "received", [[], [b"a", b"b", b"c"], [b"Q", b"x"], [b"Q" + HEAD_7 + b"0", b"x"], [b"\0" + HEAD_7, b"x"]]
)
def test_frames_of_no_kind_are_refused(received: list[bytes]) -> None:
    with pytest.raises(BadFrames):
        frames.parse(received)


def test_an_identity_names_service_and_incarnation() -> None:
    assert frames.identity("draft", 1234) == "draft-00000000000004d2"
    assert frames.parse_identity(b"draft-00000000000004d2") == "draft-00000000000004d2"


@pytest.mark.parametrize(
    ("service", "incarnation"), [("", 1), ("Draft", 1), ("draft", 1 << 64), ("draft", -1)]
)
def test_an_identity_that_could_not_be_parsed_is_not_made(service: str, incarnation: int) -> None:
    with pytest.raises(ValueError, match="peer identity"):
        frames.identity(service, incarnation)


@pytest.mark.parametrize(
    "frame", [b"", b"\0\1\2\3\4", b"draft", b"draft-1", b"draft-00000000000004d2\n", b"x" * 255]
)
def test_a_strange_identity_is_refused(frame: bytes) -> None:
    with pytest.raises(BadFrames, match="peer identity"):
        frames.parse_identity(frame)
