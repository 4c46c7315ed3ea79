"""What a client does when its gateway misbehaves: the gateway is a script here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio
from zmq_harness import ipc_address

from paceline import AsyncClient, ConnectionLost, InvalidRequest, PacelineError, Unavailable, wire

NEVER_MS = 3_600_000


class Gateway:
    """A ROUTER that hears one client and says what a test wants."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._peer = b""

    async def hear(self) -> wire.FromClient:
        self._peer, frame = await self._socket.recv_multipart()
        return wire.decode_from_client(frame)

    async def say(self, *messages: wire.Message | bytes) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else wire.encode(message)
            await self._socket.send_multipart([self._peer, frame])

    async def welcome(self, epoch: int = 1, heartbeat_ms: int = NEVER_MS, max_bytes: int = 1000) -> None:
        assert isinstance(await self.hear(), wire.Hello)
        model = wire.ModelInfo("script", 100, 100, "none")
        await self.say(wire.Welcome(1, epoch, heartbeat_ms, wire.Limits(4, max_bytes), model))

    async def hear_generate(self) -> wire.Generate:
        generate = await self.hear()
        assert isinstance(generate, wire.Generate)
        return generate


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Gateway, AsyncClient]]:
    context = zmq.asyncio.Context()
    with ipc_address() as address:
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(address)
        try:
            async with AsyncClient(address) as client:
                yield Gateway(socket), client
        finally:
            socket.close()
            context.term()


def chunk(seq: int, text: str = "x", request: int = 1) -> wire.Chunk:
    return wire.Chunk(request, seq, [5], text, [False], [len(text)], 0, 0)


def final(seq: int, request: int = 1) -> wire.Final:
    return wire.Final(
        request,
        seq,
        "length",
        None,
        wire.Usage(1, 1, 0),
        0,
        wire.SpecStats(1, 0, 0, []),
        wire.Timings(0.0, 0.0, 0.0),
    )


async def test_a_lost_chunk_fails_the_stream_and_cancels_the_rest():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        await gateway.hear_generate()
        await gateway.say(chunk(0), chunk(2))
        assert (await anext(stream)).seq == 0
        with pytest.raises(ConnectionLost, match="messages 1 to 1"):
            await anext(stream)
        assert await gateway.hear() == wire.Cancel(1)


async def test_a_final_after_a_lost_chunk_fails_the_stream():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        await gateway.hear_generate()
        await gateway.say(chunk(0), final(2))
        with pytest.raises(ConnectionLost):
            await stream.result()


async def test_credit_goes_back_as_chunks_are_read():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        window = (await gateway.hear_generate()).credit
        await gateway.say(*(chunk(seq) for seq in range(window)))
        for _ in range(window // 2):
            await anext(stream)
        assert await gateway.hear() == wire.Credit(1, window // 2)


async def test_a_silent_gateway_is_lost_and_a_new_hello_follows():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome(heartbeat_ms=10)
        await gateway.hear_generate()
        with pytest.raises(ConnectionLost, match="silent"):
            await stream.result()
        heard = await gateway.hear()
        while isinstance(heard, wire.Heartbeat):
            heard = await gateway.hear()
        assert isinstance(heard, wire.Hello)


async def test_a_heartbeat_of_another_epoch_is_a_restart():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome(epoch=1)
        await gateway.hear_generate()
        await gateway.say(wire.Heartbeat(1), wire.Heartbeat(2))
        with pytest.raises(ConnectionLost, match="restarted"):
            await stream.result()


async def test_a_request_that_was_not_sent_survives_a_restart():
    async with scripted() as (gateway, client):
        await_model = asyncio.ensure_future(client.model())
        await gateway.welcome()
        await await_model
        await gateway.say(wire.Error(0, 409, wire.HELLO_REQUIRED, "who?"))
        assert isinstance(await gateway.hear(), wire.Hello)
        stream = client.generate("x")
        await gateway.say(
            wire.Welcome(1, 2, NEVER_MS, wire.Limits(4, 1000), wire.ModelInfo("script", 100, 100, "none"))
        )
        assert (await gateway.hear_generate()).id == 1
        await gateway.say(chunk(0), final(1))
        assert (await stream.result()).text == "x"


async def test_a_rejected_client_fails_its_requests():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.hear()
        await gateway.say(wire.Reject(503, "too_many_clients", "full"))
        with pytest.raises(Unavailable, match="full"):
            await stream.result()


async def test_messages_of_a_newer_gateway_are_ignored():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        await gateway.hear_generate()
        await gateway.say(b"\x91\xa5Novel", chunk(7, request=99), wire.Error(0, 400, "bad_message", "what?"))
        await gateway.say(chunk(0), final(1))
        assert (await stream.result()).text == "x"


async def test_a_request_larger_than_the_gateway_takes_is_not_sent():
    async with scripted() as (gateway, client):
        large, small = client.generate("x" * 1000), client.generate("x")
        await gateway.welcome(max_bytes=1000)
        with pytest.raises(InvalidRequest, match="takes 1000") as refused:
            await large.result()
        assert refused.value.code == "request_too_large"
        assert (await gateway.hear_generate()).id == 2
        await small.aclose()


async def test_a_dropped_stream_is_cancelled_once_on_the_wire():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        await gateway.hear_generate()
        await stream.aclose()
        await stream.aclose()
        assert await gateway.hear() == wire.Cancel(1)
        with pytest.raises(PacelineError, match="closed"):
            await anext(stream)
        other = client.generate("y")
        assert (await gateway.hear_generate()).id == 2
        await other.aclose()


async def test_a_client_that_closes_says_goodbye():
    async with scripted() as (gateway, client):
        stream = client.generate("x")
        await gateway.welcome()
        await gateway.hear_generate()
        await client.close()
        assert await gateway.hear() == wire.Goodbye()
        with pytest.raises(PacelineError, match="closed"):
            await anext(stream)
