"""What the ZeroMQ front does for peers that keep the protocol and for those that do not."""

import asyncio

import msgspec
import pytest
from fake_engine import FakeEngine
from zmq_harness import NEVER_S, ByteTokenizer, ipc_address, peer_of, serving

from paceline import wire
from services.gateway.zmq.front import BindError, ZmqFront
from services.gateway.zmq.settings import AddressRefused, ZmqSettings

TEXT = "riders take turns at the front"


async def test_hello_comes_first():
    async with serving() as stack, peer_of(stack.address) as peer:
        for message in (wire.Generate(1, "x"), wire.Cancel(1), wire.Credit(1, 1), wire.Heartbeat(0)):
            await peer.say(message)
            answer = await peer.hear()
            assert (answer.id, answer.code) == (0, wire.HELLO_REQUIRED)
        assert stack.engine.specs == []
        welcome = await peer.hello()
        assert welcome.server_epoch == stack.front.epoch
        assert welcome.model == wire.ModelInfo("tiny", 256, 258, "fake")


async def test_another_protocol_is_rejected():
    async with serving() as stack, peer_of(stack.address) as peer:
        await peer.say(wire.Hello(2, 9, "newer"))
        reject = await peer.hear()
        assert (reject.code, reject.status) == ("unsupported_protocol", 400)


async def test_a_client_too_many_is_rejected():
    settings = ZmqSettings(heartbeat_s=NEVER_S, max_clients=1)
    async with serving(settings=settings) as stack, peer_of(stack.address) as first:
        await first.hello()
        async with peer_of(stack.address) as second:
            await second.say(wire.Hello(1, 1, "second"))
            assert (await second.hear()).code == "too_many_clients"


async def test_chunks_are_numbered_and_end_in_one_final():
    async with serving(FakeEngine(script=lambda _: TEXT)) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x", params=wire.Params(seed=3)))
        chunks, final = await peer.hear_to_end(1)
        assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
        assert final.seq == len(chunks)
        assert "".join(chunk.text for chunk in chunks) == TEXT
        assert final.seed == 3
        await peer.say(wire.Heartbeat(stack.front.epoch))
        assert await peer.hear() == wire.Heartbeat(stack.front.epoch)


async def test_out_of_credit_chunks_are_merged_and_nothing_is_lost():
    engine = FakeEngine(script=lambda _: TEXT, tokens_per_step=(2,))
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x", credit=2))
        chunks, final = await peer.hear_to_end(1)
    assert len(chunks) == 3
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [chunk.steps for chunk in chunks[:2]] == [1, 1]
    assert sum(chunk.steps for chunk in chunks) == final.spec.steps
    assert sum(chunk.accepted for chunk in chunks) == final.spec.accepted
    for chunk in chunks:
        assert sum(chunk.spans) == len(chunk.text)
        assert len(chunk.from_draft) == len(chunk.token_ids)


async def test_credit_lets_held_chunks_go():
    engine = FakeEngine(script=lambda _: TEXT, tokens_per_step=(2,))
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x", credit=1))
        engine.gate.allow(3)
        assert (await peer.hear()).text == TEXT[:2]
        await peer.say(wire.Credit(1, 1))
        held = await peer.hear()
        assert TEXT[2:6].startswith(held.text)
        engine.gate.open()
        await peer.hear_to_end(1)


async def test_a_live_id_may_not_be_used_twice_and_its_stream_goes_on():
    engine = FakeEngine(script=lambda _: TEXT)
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"), wire.Generate(1, "y"))
        assert (await peer.hear()).code == "duplicate_id"
        engine.gate.open()
        chunks, final = await peer.hear_to_end(1)
        assert "".join(chunk.text for chunk in chunks) == TEXT
        assert final.finish_reason == "stop"
        await peer.say(wire.Generate(1, "again"))
        _, final = await peer.hear_to_end(1)
        assert final.finish_reason == "stop"


async def test_two_clients_may_use_the_same_id():
    engine = FakeEngine(script=lambda ids: bytes(ids[1:]).decode() * 3)
    async with serving(engine) as stack, peer_of(stack.address) as one, peer_of(stack.address) as other:
        await one.hello()
        await other.hello()
        await one.say(wire.Generate(1, "one"))
        await other.say(wire.Generate(1, "two"))
        for peer, text in ((one, "oneoneone"), (other, "twotwotwo")):
            chunks, _ = await peer.hear_to_end(1)
            assert "".join(chunk.text for chunk in chunks) == text


async def test_requests_beyond_a_clients_limit_are_refused():
    engine = FakeEngine()
    engine.gate.hold()
    settings = ZmqSettings(heartbeat_s=NEVER_S, max_requests=2)
    async with serving(engine, settings) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"), wire.Generate(2, "x"), wire.Generate(3, "x"))
        answer = await peer.hear()
        assert (answer.id, answer.status) == (3, 429)


async def test_cancel_is_idempotent_and_answered_by_one_final():
    engine = FakeEngine()
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Cancel(1), wire.Generate(1, "x"), wire.Cancel(1), wire.Cancel(1))
        chunks, final = await peer.hear_to_end(1)
        assert (chunks, final.finish_reason) == ([], "abort")
        await peer.say(wire.Cancel(1))
        assert await peer.hears_nothing()
        await engine.idle()


async def test_a_client_that_is_not_heard_loses_its_requests():
    engine = FakeEngine()
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"))
        await engine.until(lambda engine: len(engine.running) == 1)
        now = asyncio.get_running_loop().time()
        stack.front.expire(now + wire.MISSED_HEARTBEATS * NEVER_S - 1)
        assert len(engine.running) == 1
        stack.front.expire(now + wire.MISSED_HEARTBEATS * NEVER_S + 1)
        await engine.idle()
        assert stack.front.counters["expired_clients"] == 1
        await peer.say(wire.Heartbeat(stack.front.epoch))
        answers = [await peer.hear()]
        while not isinstance(answers[-1], wire.Error):
            answers.append(await peer.hear())
        assert answers[-1].code == wire.HELLO_REQUIRED


async def test_a_silent_client_is_given_up_without_being_asked():
    engine = FakeEngine()
    engine.gate.hold()
    settings = ZmqSettings(heartbeat_s=0.01)
    async with serving(engine, settings) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"))
        await engine.until(lambda engine: bool(engine.specs))
        await engine.idle()


async def test_a_client_that_is_gone_loses_its_requests_when_it_cannot_be_reached():
    engine = FakeEngine(max_model_len=10**6)
    engine.gate.hold()
    async with serving(engine) as stack:
        async with peer_of(stack.address) as peer:
            await peer.hello()
            await peer.say(wire.Generate(1, "x"))
            await engine.until(lambda engine: len(engine.running) == 1)
        async with asyncio.timeout(5):
            while engine.running:
                engine.gate.allow(1)
                await asyncio.sleep(0.01)  # the kernel tells the front when it likes
        assert stack.front.counters["lost_clients"] == 1


async def test_a_bug_in_handling_a_message_does_not_end_the_loop():
    async with serving() as stack, peer_of(stack.address) as peer:
        info, stack.engine.info = stack.engine.info, None
        await peer.say(wire.Hello(1, 1, "x"), wire.Heartbeat(0))
        await peer.hear()
        stack.engine.info = info
        await peer.hello()


async def test_a_client_that_says_goodbye_leaves_nothing():
    engine = FakeEngine()
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"))
        await engine.until(lambda engine: len(engine.running) == 1)
        await peer.say(wire.Goodbye())
        await engine.idle()
        await peer.say(wire.Cancel(1))
        answers = [await peer.hear(), await peer.hear()]
        assert answers[0].finish_reason == "abort"
        assert answers[1].code == wire.HELLO_REQUIRED


async def test_a_repeated_hello_starts_afresh():
    engine = FakeEngine()
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"))
        await engine.until(lambda engine: len(engine.running) == 1)
        await peer.hello()
        await engine.idle()


GARBAGE = [
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x91" * 5000,
    msgspec.msgpack.encode(["Generate", 9, {"a": 1}]),
    msgspec.msgpack.encode(["Welcome", 1, 2, 3, [1, 2], ["m", 1, 1, "d"]]),
    bytes(range(256)),
]


@pytest.mark.parametrize("frame", GARBAGE)
async def test_garbage_is_counted_and_answered_and_a_neighbour_goes_on(frame):
    engine = FakeEngine(script=lambda _: TEXT)
    async with serving(engine) as stack, peer_of(stack.address) as peer, peer_of(stack.address) as neighbour:
        await neighbour.hello()
        await peer.say(frame)
        answer = await peer.hear()
        assert (answer.code, answer.status) == ("bad_message", 400)
        assert stack.front.counters["bad_frames"] == 1
        await neighbour.say(wire.Generate(1, "x"))
        chunks, _ = await neighbour.hear_to_end(1)
        assert "".join(chunk.text for chunk in chunks) == TEXT


async def test_a_message_of_several_frames_is_garbage():
    async with serving() as stack, peer_of(stack.address) as peer:
        await peer.say_frames(b"", wire.encode(wire.Hello(1, 1, "req")))
        assert (await peer.hear()).code == "bad_message"


async def test_a_bad_request_is_answered_by_its_id():
    async with serving() as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(msgspec.msgpack.encode(["Generate", 5, "x", None, None, ["many"]]))
        assert (await peer.hear()).id == 5
        await peer.say(wire.Generate(6, "x", token_ids=[1]))
        assert (await peer.hear()).param == "prompt"
        await peer.say(wire.Generate(0, "x"))
        assert (await peer.hear()).code == "invalid_value"


async def test_a_frame_over_the_limit_disconnects_its_sender_alone():
    settings = ZmqSettings(heartbeat_s=NEVER_S, max_message_bytes=1000)
    engine = FakeEngine(script=lambda _: TEXT)
    async with serving(engine, settings) as stack, peer_of(stack.address) as neighbour:
        welcome = await neighbour.hello()
        assert welcome.limits.max_message_bytes == 1000
        async with peer_of(stack.address) as peer:
            await peer.hello()
            await peer.say(wire.Generate(1, "x" * 2000))
            await neighbour.say(wire.Generate(1, "x"))
            await neighbour.hear_to_end(1)
    assert len(engine.specs) == 1


async def test_a_bug_in_one_request_is_its_own_error():
    class Broken(ByteTokenizer):
        def encode(self, text, add_special):
            if text == "bad":
                raise ZeroDivisionError
            return super().encode(text, add_special)

    with ipc_address() as address:
        front = ZmqFront(
            FakeEngine(script=lambda _: TEXT), Broken(), address, ZmqSettings(heartbeat_s=NEVER_S)
        )
        await front.start()
        async with peer_of(address) as peer:
            await peer.hello()
            await peer.say(wire.Generate(1, "bad"))
            answer = await peer.hear()
            assert (answer.id, answer.code) == (1, "internal_error")
            await peer.say(wire.Generate(2, "good"))
            _, final = await peer.hear_to_end(2)
            assert final.finish_reason == "stop"
        await front.close()


async def test_a_request_that_fails_in_the_front_frees_its_generation():
    class Broken(ByteTokenizer):
        def token_bytes(self, token_id):
            raise ZeroDivisionError

    engine = FakeEngine()
    engine.gate.hold()
    engine.gate.allow(1)
    with ipc_address() as address:
        front = ZmqFront(engine, Broken(), address, ZmqSettings(heartbeat_s=NEVER_S))
        await front.start()
        async with peer_of(address) as peer:
            await peer.hello()
            await peer.say(wire.Generate(1, "x"))
            assert (await peer.hear()).code == "internal_error"
            await engine.idle()
        await front.close()


async def test_close_ends_every_stream_with_an_error():
    engine = FakeEngine()
    engine.gate.hold()
    async with serving(engine) as stack, peer_of(stack.address) as peer:
        await peer.hello()
        await peer.say(wire.Generate(1, "x"), wire.Generate(2, "x"))
        await engine.until(lambda engine: len(engine.running) == 2)
        closing = asyncio.ensure_future(stack.front.close())
        answers = [await peer.hear() for _ in range(3)]
        await closing
    assert [answer.code for answer in answers] == ["shutting_down"] * 3
    assert isinstance(answers[2], wire.Reject)
    await engine.idle()


async def test_an_address_in_use_is_named_with_a_remedy():
    with ipc_address() as address:
        path = address.removeprefix("ipc://")
        missing = f"ipc://{path}/below/a/file"
        front = ZmqFront(FakeEngine(), ByteTokenizer(), missing)
        with pytest.raises(BindError, match="--zmq-port"):
            await front.start()
        await front.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:8001", "tcp://[::1]:8001", "ipc:///run/paceline/front"])
async def test_loopback_and_ipc_addresses_are_taken(address):
    ZmqFront(FakeEngine(), ByteTokenizer(), address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://0.0.0.0:8001", "other machines"),
        ("tcp://*:8001", "other machines"),
        ("tcp://192.168.0.7:8001", "other machines"),
        ("tcp://example.org:8001", "other machines"),
        ("tcp://127.0.0.1", "not an address"),
        ("tcp://127.0.0.1:99999", "not an address"),
        ("udp://127.0.0.1:1", "not an address"),
        ("127.0.0.1:8001", "not an address"),
        ("ipc:///" + "x" * 107, "at most 107"),
    ],
)
async def test_other_addresses_are_refused(address, why):
    with pytest.raises(AddressRefused, match=why):
        ZmqFront(FakeEngine(), ByteTokenizer(), address)
