"""The asyncio core of both clients: one socket to a gateway, kept up by one task.

The task says Hello, then converses until the gateway is lost, and starts again with a fresh socket after a
growing, jittered delay. Requests that were sent fail with ConnectionLost when that happens; requests that
were not wait for the next Welcome, within the time that they may wait for a connection.
"""

from __future__ import annotations

import asyncio
import logging
import random

import msgspec
import zmq
import zmq.asyncio

from paceline import wire
from paceline.errors import ConnectionLost, InvalidRequest, PacelineError, RequestTimeout, from_status
from paceline.request import Request

HELLO_TIMEOUT_S = 2.0
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0
CLOSE_LINGER_MS = 100
"""A moment to let the last message out."""

log = logging.getLogger("paceline")


class Connection:
    """Owns the live requests. Every method but `__init__` runs on the event loop that `start` ran on."""

    def __init__(self, address: str, client: str) -> None:
        self._address = address
        self._hello = wire.Hello(wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, client)
        self._live: dict[int, Request] = {}
        self._last_id = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._welcome: wire.Welcome | None = None
        self._greeted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="paceline-connection")

    async def greeted(self, timeout_s: float) -> wire.Welcome:
        """What the gateway told of itself. Raises RequestTimeout."""
        self.start()
        try:
            async with asyncio.timeout(timeout_s):
                await self._greeted.wait()
        except TimeoutError:
            raise self._unanswered(timeout_s) from None
        assert self._welcome is not None
        return self._welcome

    def submit(self, generate: wire.Generate, connect_timeout_s: float, timeout_s: float) -> Request:
        """Takes a request, its id still 0, and sends it as soon as there is a connection."""
        self.start()
        self._last_id += 1
        request = Request(msgspec.structs.replace(generate, id=self._last_id))
        self._live[self._last_id] = request
        loop = asyncio.get_running_loop()
        wait_s = min(connect_timeout_s, timeout_s)
        request.timers = [
            loop.call_later(wait_s, self._give_up_connecting, request, wait_s),
            loop.call_later(timeout_s, self._give_up, request, timeout_s),
        ]
        if self._welcome is not None:
            self._send_generate(request, self._welcome)
        return request

    def cancel(self, request: Request) -> None:
        """Idempotent. The request ends with finish_reason abort, or is gone if it was never sent."""
        if request.ended:
            return
        if request.sent:
            self._send(wire.Cancel(request.generate.id))
        else:
            self._live.pop(request.generate.id, None)
            request.finish(_never_sent(request.generate))

    def abandon(self, request: Request) -> None:
        """Cancels a request that nobody reads any more."""
        self.cancel(request)
        self._fail(request, PacelineError("this stream was closed"))

    def return_credit(self, request: Request) -> None:
        """Tells the gateway how many chunks have been read, half a window at a time."""
        if request.unreturned_credit >= request.generate.credit // 2 and not request.ended:
            self._send(wire.Credit(request.generate.id, request.unreturned_credit))
            request.unreturned_credit = 0

    async def close(self) -> None:
        """Cancels what is live and closes the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._send(wire.Goodbye())
        self._fail_all(PacelineError("the client was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        context = zmq.asyncio.Context()
        delay_s = FIRST_RETRY_S
        try:
            while True:
                socket = _open(context, self._address)
                self._socket = socket
                try:
                    self._welcome = welcome = await self._greet(socket)
                    delay_s = FIRST_RETRY_S
                    await self._converse(socket, welcome)
                except ConnectionLost as lost:
                    self._fail_sent(lost)
                except zmq.ZMQError as error:
                    self._fail_sent(ConnectionLost(f"the connection to {self._address} broke: {error}"))
                except PacelineError as refused:
                    self._fail_all(refused)
                finally:
                    self._socket, self._welcome = None, None
                    self._greeted.clear()
                    socket.close()
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, LONGEST_RETRY_S)
        finally:
            context.term()

    async def _greet(self, socket: zmq.asyncio.Socket) -> wire.Welcome:
        """Raises ConnectionLost if no Welcome comes, another PacelineError if the gateway refuses."""
        self._send(self._hello)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                while True:
                    match self._decode(await socket.recv()):
                        case wire.Welcome() as welcome:
                            return welcome
                        case wire.Reject() as reject:
                            raise self._rejected(reject)
        except TimeoutError:
            raise ConnectionLost(f"no answer from {self._address}") from None

    async def _converse(self, socket: zmq.asyncio.Socket, welcome: wire.Welcome) -> None:
        """Ends by ConnectionLost only, or by the error that the gateway rejects this client with."""
        for request in list(self._live.values()):
            self._send_generate(request, welcome)
        self._greeted.set()
        loop = asyncio.get_running_loop()
        interval_s = welcome.heartbeat_ms / 1000
        beat_at = loop.time() + interval_s
        lost_at = loop.time() + wire.MISSED_HEARTBEATS * interval_s
        arriving = asyncio.ensure_future(socket.recv())
        try:
            while True:
                await asyncio.wait({arriving}, timeout=max(0.0, beat_at - loop.time()))
                if arriving.done():
                    self._receive(self._decode(arriving.result()), welcome)
                    lost_at = loop.time() + wire.MISSED_HEARTBEATS * interval_s
                    arriving = asyncio.ensure_future(socket.recv())
                elif loop.time() >= lost_at:
                    silent_s = wire.MISSED_HEARTBEATS * interval_s
                    raise ConnectionLost(
                        f"{self._address} has been silent for {silent_s:g} s: is the server running?"
                    )
                if loop.time() >= beat_at:
                    self._send(wire.Heartbeat(welcome.server_epoch))
                    beat_at = loop.time() + interval_s
        finally:
            arriving.cancel()

    def _receive(self, message: wire.FromGateway | None, welcome: wire.Welcome) -> None:
        match message:
            case wire.Chunk() | wire.Final():
                self._deliver(message)
            case wire.Error(code=wire.HELLO_REQUIRED):
                raise ConnectionLost(f"the server at {self._address} restarted or gave this client up")
            case wire.Error():
                request = self._live.get(message.id)
                if request is not None:
                    self._fail(
                        request, from_status(message.status, message.message, message.code, message.param)
                    )
                elif message.id == 0:
                    log.warning("%s did not understand a message: %s", self._address, message.message)
            case wire.Heartbeat() | wire.Welcome() if message.server_epoch != welcome.server_epoch:
                raise ConnectionLost(f"the server at {self._address} restarted")
            case wire.Reject():
                raise self._rejected(message)

    def _deliver(self, message: wire.Chunk | wire.Final) -> None:
        request = self._live.get(message.id)
        if request is None:
            return
        try:
            if isinstance(message, wire.Chunk):
                request.push(message)
            else:
                request.finish(message)
                del self._live[message.id]
        except ConnectionLost as lost:
            self._send(wire.Cancel(message.id))
            self._fail(request, lost)

    def _send_generate(self, request: Request, welcome: wire.Welcome) -> None:
        frame = wire.encode(request.generate)
        if len(frame) > welcome.limits.max_message_bytes:
            too_large = (
                f"the request has {len(frame)} bytes, the server takes {welcome.limits.max_message_bytes}"
            )
            self._fail(request, InvalidRequest(f"{too_large}: send less", "request_too_large"))
        elif not self._send_frame(frame):
            self._fail(request, ConnectionLost(f"the connection to {self._address} is stuck: try again"))
        else:
            request.sent = True
            request.timers[0].cancel()

    def _send(self, message: wire.Message) -> None:
        # A frame that cannot be queued is lost like one on the way: heartbeats find out.
        self._send_frame(wire.encode(message))

    def _send_frame(self, frame: bytes) -> bool:
        """Never waits. False if the socket is gone or its queue is full."""
        if self._socket is None:
            return False
        sent: asyncio.Future[object] = asyncio.ensure_future(self._socket.send(frame, flags=zmq.NOBLOCK))
        return sent.exception() is None

    def _decode(self, frame: bytes) -> wire.FromGateway | None:
        """None for what a newer gateway may say and this client does not know."""
        try:
            return wire.decode_from_gateway(frame)
        except wire.WireError as error:
            log.warning("%s sent a message that was ignored: %s", self._address, error)
            return None

    def _fail(self, request: Request, error: PacelineError) -> None:
        self._live.pop(request.generate.id, None)
        request.fail(error)

    def _fail_sent(self, error: PacelineError) -> None:
        for request in [request for request in self._live.values() if request.sent]:
            self._fail(request, error)

    def _fail_all(self, error: PacelineError) -> None:
        for request in list(self._live.values()):
            self._fail(request, error)

    def _give_up_connecting(self, request: Request, waited_s: float) -> None:
        if not request.sent:
            self._fail(request, self._unanswered(waited_s))

    def _give_up(self, request: Request, waited_s: float) -> None:
        if not request.ended:
            self.cancel(request)
            self._fail(
                request,
                RequestTimeout(
                    f"the generation at {self._address} did not end within {waited_s:g} s: "
                    "give a longer timeout_s or fewer max_tokens"
                ),
            )

    def _unanswered(self, waited_s: float) -> RequestTimeout:
        return RequestTimeout(
            f"no answer from {self._address} within {waited_s:g} s: is the server running (make serve), "
            "and is this the address of its ZeroMQ port?"
        )

    def _rejected(self, reject: wire.Reject) -> PacelineError:
        return from_status(reject.status, f"{self._address}: {reject.message}", reject.code)


def _open(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.LINGER, CLOSE_LINGER_MS)
    socket.connect(address)
    return socket


def _never_sent(generate: wire.Generate) -> wire.Final:
    return wire.Final(
        id=generate.id,
        seq=0,
        finish_reason="abort",
        stop_reason=None,
        usage=wire.Usage(prompt=0, completion=0, cached=0),
        seed=generate.params.seed or 0,
        spec=wire.SpecStats(steps=0, drafted=0, accepted=0, histogram=[]),
        timings=wire.Timings(queue_s=0.0, first_token_s=0.0, total_s=0.0),
    )
