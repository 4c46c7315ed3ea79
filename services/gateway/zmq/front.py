"""The ZeroMQ front: a ROUTER that speaks `paceline.wire` and hands requests to the engine.

A client that is not heard for MISSED_HEARTBEATS intervals, cannot be reached, or does not take what it gave
credit for is given up: its requests are cancelled and it has to say Hello again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio

from paceline import wire
from services.gateway.admission import RequestError, refusal
from services.gateway.engine import AdmissionError, Engine
from services.gateway.zmq.run import FrontTokenizer, run
from services.gateway.zmq.settings import ZmqSettings, check_address
from services.gateway.zmq.stream import Stream

CLOSE_LINGER_MS = 500

log = logging.getLogger(__name__)


class BindError(OSError):
    """The front's address cannot be listened on."""


class _Client:
    """A peer that said Hello. streams: its live requests by id."""

    def __init__(self, identity: bytes, name: str, heard_at: float) -> None:
        self.identity = identity
        self.name = name
        self.heard_at = heard_at
        self.streams: dict[int, Stream] = {}


class ZmqFront:
    """counters: clients, requests, bad_frames, lost_clients, expired_clients since the start."""

    def __init__(
        self, engine: Engine, tokenizer: FrontTokenizer, address: str, settings: ZmqSettings | None = None
    ) -> None:
        """Raises AddressRefused."""
        check_address(address)
        self.counters: Counter[str] = Counter()
        self.epoch = secrets.randbits(63)
        self._engine = engine
        self._tokenizer = tokenizer
        self._address = address
        self._settings = settings or ZmqSettings()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._clients: dict[bytes, _Client] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens. Raises BindError."""
        socket = self._context.socket(zmq.ROUTER)
        socket.set(zmq.MAXMSGSIZE, self._settings.max_message_bytes)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        # Room for every chunk that a client may have given credit for, so that only a client that does not
        # read at all can fill its queue.
        socket.set(zmq.SNDHWM, self._settings.max_requests * (wire.MAX_CREDIT + 2))
        socket.set(zmq.LINGER, CLOSE_LINGER_MS)
        try:
            socket.bind(self._address)
        except zmq.ZMQError as error:
            socket.close()
            raise BindError(
                f"cannot listen on {self._address}: {error}: stop what uses it, or give another --zmq-port"
            ) from None
        self._socket = socket
        self._spawn(self._receive(socket))
        self._spawn(self._expire_forever())

    async def close(self) -> None:
        """Ends every stream with an Error, tells every client, and stops listening. Idempotent."""
        if self._socket is None:
            return
        error = RequestError(503, "shutting_down", "The server is shutting down.")
        for client in list(self._clients.values()):
            for stream in list(client.streams.values()):
                stream.fail(error)
            self._send(client.identity, wire.Reject(error.status, error.code, error.message))
            self._forget(client)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._socket = None
        await asyncio.to_thread(self._context.term)

    def expire(self, now: float) -> None:
        """Gives up the clients that were not heard in time. now: time of the event loop."""
        oldest = now - wire.MISSED_HEARTBEATS * self._settings.heartbeat_s
        for client in [client for client in self._clients.values() if client.heard_at < oldest]:
            self.counters["expired_clients"] += 1
            log.info("client %s was not heard in time: its requests are cancelled", client.name)
            self._forget(client)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                self._handle(frames)
            except Exception:
                log.exception("a message could not be handled")
            # A peer that floods this socket must not keep the loop to itself.
            await asyncio.sleep(0)

    def _handle(self, frames: list[bytes]) -> None:
        identity, frame = frames[0], frames[-1]
        try:
            if len(frames) != 2:
                raise wire.WireError(f"a message is one frame, got {len(frames) - 1}")
            message = wire.decode_from_client(frame)
        except wire.WireError as error:
            self.counters["bad_frames"] += 1
            text = str(error)
            self._send(identity, wire.Error(wire.request_id_of(frame), 400, "bad_message", text[:500]))
            return
        client = self._clients.get(identity)
        if isinstance(message, wire.Hello):
            self._greet(identity, message, client)
        elif client is None or (isinstance(message, wire.Heartbeat) and message.server_epoch != self.epoch):
            self._send(identity, wire.Error(0, 409, wire.HELLO_REQUIRED, "say Hello first"))
        else:
            client.heard_at = asyncio.get_running_loop().time()
            self._serve(client, message)

    def _greet(self, identity: bytes, hello: wire.Hello, known: _Client | None) -> None:
        if known is not None:
            self._forget(known)
        if not hello.proto_min <= wire.PROTOCOL_VERSION <= hello.proto_max:
            versions = f"{hello.proto_min} to {hello.proto_max}"
            self._reject(
                identity,
                400,
                "unsupported_protocol",
                f"this server speaks protocol {wire.PROTOCOL_VERSION}, the client {versions}: update one",
            )
        elif len(self._clients) >= self._settings.max_clients:
            self._reject(
                identity, 503, "too_many_clients", f"{len(self._clients)} clients are connected, the limit"
            )
        else:
            now = asyncio.get_running_loop().time()
            self._clients[identity] = _Client(identity, hello.client[:80], now)
            self.counters["clients"] += 1
            self._send(identity, self._welcome())

    def _welcome(self) -> wire.Welcome:
        info = self._engine.info
        return wire.Welcome(
            proto=wire.PROTOCOL_VERSION,
            server_epoch=self.epoch,
            heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            limits=wire.Limits(self._settings.max_requests, self._settings.max_message_bytes),
            model=wire.ModelInfo(info.model, info.max_model_len, info.vocab_size, info.drafter),
        )

    def _reject(self, identity: bytes, status: int, code: str, message: str) -> None:
        self._send(identity, wire.Reject(status, code, message))

    def _serve(
        self,
        client: _Client,
        message: wire.Generate | wire.Credit | wire.Cancel | wire.Heartbeat | wire.Goodbye,
    ) -> None:
        match message:
            case wire.Generate():
                self._accept(client, message)
            case wire.Credit():
                if message.id in client.streams:
                    client.streams[message.id].grant(message.chunks)
            case wire.Cancel():
                if message.id in client.streams:
                    client.streams[message.id].cancel()
            case wire.Heartbeat():
                self._send(client.identity, wire.Heartbeat(self.epoch))
            case wire.Goodbye():
                self._forget(client)

    def _accept(self, client: _Client, message: wire.Generate) -> None:
        refused: tuple[int, str, str] | None = None
        if message.id < 1:
            refused = 400, "invalid_value", f"id {message.id}: ids are 1, 2, …"
        elif message.id in client.streams:
            refused = 409, "duplicate_id", f"id {message.id} is still live: give each request its own"
        elif len(client.streams) >= self._settings.max_requests:
            refused = (
                429,
                "rate_limit_exceeded",
                f"{len(client.streams)} requests of this client run, the limit",
            )
        if refused is not None:
            self._send(client.identity, wire.Error(max(message.id, 0), *refused))
            return
        self.counters["requests"] += 1
        stream = Stream(
            message.id,
            message.credit,
            self._tokenizer,
            lambda answer: self._send(client.identity, answer),
        )
        client.streams[message.id] = stream
        self._spawn(self._generate(client, message, stream))

    async def _generate(self, client: _Client, message: wire.Generate, stream: Stream) -> None:
        try:
            await run(self._engine, self._tokenizer, message, stream)
        except RequestError as error:
            stream.fail(error)
        except AdmissionError as error:
            stream.fail(refusal(error))
        except Exception:
            log.exception("request %d of client %s failed", message.id, client.name)
            stream.fail(RequestError(500, "internal_error", "The server failed on this request."))
        finally:
            stream.cancel()
            if client.streams.get(message.id) is stream:
                del client.streams[message.id]

    def _send(self, identity: bytes, message: wire.Message) -> None:
        """Never waits: a client that cannot be reached, or whose queue is full, is lost."""
        if self._socket is None:
            return
        sent = asyncio.ensure_future(
            self._socket.send_multipart([identity, wire.encode(message)], flags=zmq.NOBLOCK)
        )
        if sent.exception() is not None and identity in self._clients:
            self.counters["lost_clients"] += 1
            self._forget(self._clients[identity])

    def _forget(self, client: _Client) -> None:
        if self._clients.get(client.identity) is client:
            del self._clients[client.identity]
        for stream in list(client.streams.values()):
            stream.cancel()

    async def _expire_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            self.expire(loop.time())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
