"""A ZeroMQ front on a fake engine, and a peer that says on the wire what a test wants."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from fake_engine import FakeEngine
from tiny_tokenizer import TinyTokenizer

from paceline import wire
from services.gateway.zmq.front import ZmqFront
from services.gateway.zmq.settings import ZmqSettings

NEVER_S = 3600.0
"""A heartbeat interval that no test reaches."""


class ByteTokenizer(TinyTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


@dataclass
class Stack:
    engine: FakeEngine
    front: ZmqFront
    address: str


@contextmanager
def ipc_address() -> Iterator[str]:
    """Short enough for a socket's path, wherever the tests' own directory is."""
    with tempfile.TemporaryDirectory(prefix="pl-") as directory:
        yield f"ipc://{directory}/front"


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, settings: ZmqSettings | None = None
) -> AsyncIterator[Stack]:
    engine = engine or FakeEngine()
    with ipc_address() as address:
        front = ZmqFront(engine, ByteTokenizer(), address, settings or ZmqSettings(heartbeat_s=NEVER_S))
        await front.start()
        try:
            yield Stack(engine, front, address)
        finally:
            await front.close()


class Server:
    """A front on an event loop of its own, for tests that block."""

    engine: FakeEngine
    address: str

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = FakeEngine(**self._options)
        async with serving(self.engine) as stack:
            self.address = stack.address
            self._up.set()
            await self._stop.wait()

    def __enter__(self) -> Server:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def hold_after(self, steps: int) -> None:
        async def hold() -> None:
            self.engine.gate.hold()
            self.engine.gate.allow(steps)

        asyncio.run_coroutine_threadsafe(hold(), self._loop).result()

    def wait_idle(self) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.idle(), self._loop).result()


class Peer:
    """A DEALER with no manners of its own."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def say(self, *messages: wire.Message | bytes) -> None:
        for message in messages:
            await self._socket.send(message if isinstance(message, bytes) else wire.encode(message))

    async def say_frames(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def hear(self) -> wire.FromGateway:
        return wire.decode_from_gateway(await self._socket.recv())

    async def hears_nothing(self) -> bool:
        """The front answers in order: what it had to say comes before the answer to a heartbeat."""
        await self.say(wire.Heartbeat(0))
        answer = await self.hear()
        return isinstance(answer, wire.Error) and answer.code == wire.HELLO_REQUIRED

    async def hello(self) -> wire.Welcome:
        await self.say(wire.Hello(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, "test/1"))
        welcome = await self.hear()
        assert isinstance(welcome, wire.Welcome)
        return welcome

    async def hear_to_end(self, request_id: int) -> tuple[list[wire.Chunk], wire.Final | wire.Error]:
        chunks: list[wire.Chunk] = []
        while True:
            message = await self.hear()
            if isinstance(message, wire.Chunk):
                assert message.id == request_id
                chunks.append(message)
            elif isinstance(message, wire.Final | wire.Error):
                assert message.id == request_id
                return chunks, message


@asynccontextmanager
async def peer_of(address: str) -> AsyncIterator[Peer]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.connect(address)
    try:
        yield Peer(socket)
    finally:
        socket.close()
        context.term()
