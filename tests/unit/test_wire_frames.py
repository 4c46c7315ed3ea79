"""The bytes of the client protocol: what stands here is what other implementations rely on."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire

GOLDEN = [
    (
        wire.Hello(1, 1, "paceline-python/0.1.0"),
        "94a548656c6c6f0101b5706163656c696e652d707974686f6e2f302e312e30",
    ),
    (
        wire.Generate(id=7, prompt="hé", params=wire.Params(max_tokens=16, temperature=0.0, seed=2**64 - 1)),
        "97a847656e657261746507a368c3a9c0c09a10cb0000000000000000c0c0c0cfffffffffffffffffc0c0c0c020",
    ),
    (
        wire.Generate(
            id=8,
            messages=[{"role": "user", "content": "hi"}],
            params=wire.Params(stop=["\n"], stop_token_ids=[2], ignore_eos=True, priority=-1),
            credit=4,
        ),
        "97a847656e657261746508c09182a4726f6c65a475736572a7636f6e74656e74a26869c09ac0c0c0c0c0c091a10a9102c3ff04",
    ),
    (wire.Generate(id=9, token_ids=[1, 300]), "97a847656e657261746509c0c09201cd012c9ac0c0c0c0c0c0c0c0c0c020"),
    (wire.Credit(id=7, chunks=16), "93a64372656469740710"),
    (wire.Cancel(7), "92a643616e63656c07"),
    (wire.Goodbye(), "91a7476f6f64627965"),
    (wire.Heartbeat(5), "92a9486561727462656174" + "05"),
    (
        wire.Welcome(
            proto=1,
            server_epoch=5,
            heartbeat_ms=2000,
            limits=wire.Limits(max_requests=128, max_message_bytes=16777216),
            model=wire.ModelInfo(name="m", max_model_len=8192, vocab_size=49152, drafter="ngram"),
        ),
        "96a757656c636f6d650105cd07d092cc80ce0100000094a16dcd2000cdc000a56e6772616d",
    ),
    (
        wire.Reject(status=503, code="shutting_down", message="bye"),
        "94a652656a656374cd01f7ad7368757474696e675f646f776ea3627965",
    ),
    (
        wire.Chunk(
            id=7,
            seq=0,
            token_ids=[5, 6],
            text="ab",
            from_draft=[True, False],
            spans=[0, 1, 1],
            drafted=4,
            accepted=1,
            steps=2,
        ),
        "9aa54368756e6b0700920506a2616292c3c293000101040102",
    ),
    (
        wire.Final(
            id=7,
            seq=1,
            finish_reason="stop",
            stop_reason="\n",
            usage=wire.Usage(prompt=3, completion=2, cached=0),
            seed=11,
            spec=wire.SpecStats(steps=1, drafted=4, accepted=1, histogram=[0, 1]),
            timings=wire.Timings(queue_s=0.0, first_token_s=0.5, total_s=1.0),
        ),
        "99a546696e616c0701a473746f70a10a930302000b94010401920001"
        "93cb0000000000000000cb3fe0000000000000cb3ff0000000000000",
    ),
    (
        wire.Error(id=7, status=400, code="invalid_value", message="no", param="top_p"),
        "96a54572726f7207cd0190ad696e76616c69645f76616c7565a26e6fa5746f705f70",
    ),
]
FROM_CLIENT = (wire.Hello, wire.Generate, wire.Credit, wire.Cancel, wire.Goodbye)


def decode(message: wire.Message, frame: bytes) -> wire.Message:
    if isinstance(message, FROM_CLIENT):
        return wire.decode_from_client(frame)
    return wire.decode_from_gateway(frame)


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: type(value).__name__)
def test_messages_have_these_bytes(message, frame):
    assert wire.encode(message).hex() == frame
    assert decode(message, bytes.fromhex(frame)) == message


def test_every_message_has_a_golden_frame():
    assert {type(message) for message, _ in GOLDEN} == set(wire.Message.__subclasses__())


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: type(value).__name__)
def test_a_field_that_a_newer_peer_appended_is_ignored(message, frame):
    fields = msgspec.msgpack.decode(bytes.fromhex(frame))
    assert decode(message, msgspec.msgpack.encode([*fields, "new", {"more": 1}])) == message


def test_fields_with_defaults_may_be_missing():
    assert wire.decode_from_client(msgspec.msgpack.encode(["Generate", 3, "x"])) == wire.Generate(3, "x")
    error = wire.decode_from_gateway(msgspec.msgpack.encode(["Error", 3, 500, "c", "m"]))
    assert error == wire.Error(3, 500, "c", "m")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"Hello": 1}),
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode(["Chunk", 1, 0, [], "", [], [], 0, 0]),
        msgspec.msgpack.encode(["Cancel", "7"]),
        msgspec.msgpack.encode(["Cancel", 7]) + b"\x00",
        b"\x93\xa8Generate\x01\xa2\xff\xfe",
    ],
)
def test_what_is_no_message_of_a_client_is_a_wire_error(frame):
    with pytest.raises(wire.WireError):
        wire.decode_from_client(frame)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_wire_error(frame):
    for decoder in (wire.decode_from_client, wire.decode_from_gateway):
        try:
            decoder(frame)
        except wire.WireError:
            assert wire.request_id_of(frame) >= 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)


@given(
    st.sampled_from(["Hello", "Generate", "Credit", "Cancel", "Heartbeat", "Goodbye"]),
    st.lists(VALUES, max_size=7),
)
def test_any_fields_decode_or_are_a_wire_error(name, fields):
    frame = msgspec.msgpack.encode([name, *fields])
    try:
        message = wire.decode_from_client(frame)
    except wire.WireError:
        assert wire.request_id_of(frame) >= 0
    else:
        assert type(message).__name__ == name


def test_the_request_of_an_undecodable_message_is_found():
    assert wire.request_id_of(msgspec.msgpack.encode(["Generate", 12, 3.5])) == 12
    assert wire.request_id_of(msgspec.msgpack.encode(["Generate", -1])) == 0
    assert wire.request_id_of(msgspec.msgpack.encode(["Generate", True])) == 0
    assert wire.request_id_of(msgspec.msgpack.encode(["Hello", 12])) == 0


def test_what_msgpack_cannot_carry_is_a_wire_error():
    for prompt in ("\ud800", object()):
        with pytest.raises(wire.WireError, match="Generate cannot be encoded"):
            wire.encode(wire.Generate(1, prompt))
