"""One socket between services: typed messages in and out, and nothing else that a peer sends gets further.

A plain ZeroMQ socket is read from the event loop by its file descriptor, which only signals *edges*: any call
on the socket can take the signal for a message that another call should have read. So every send is followed
by a look for messages, and reading always goes on until the socket is empty. A slow watchdog covers the rest.
"""

import asyncio
import logging
import select
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from common.actors import frames
from common.actors.errors import Undeliverable
from common.actors.frames import BadFrames, Body, Kind
from common.actors.monitor import ConnectionMonitor
from common.actors.quiet import QuietLog
from common.actors.remote import Questions, RemoteRef

log = logging.getLogger(__name__)

In = TypeVar("In")

DRAIN_BATCH = 64  # messages handled before the loop may do something else
MAX_QUESTIONS_IN_WORK = 256


class TransportError(Exception):
    """A socket that cannot be opened, or a message of our own that is too large to send."""


@dataclass(frozen=True, slots=True)
class Limits:
    """high_water: messages queued in one direction to one peer. max_frame_bytes: a peer that sends a larger
    frame is disconnected. watchdog_s: how long a message can stay unnoticed if a wake-up is lost."""

    high_water: int = 1024
    max_frame_bytes: int = 32 << 20
    watchdog_s: float = 1.0


@dataclass(slots=True)
class Counters:
    """Since the endpoint was opened.

    bad_frames: dropped for their number, size, identity or content. undelivered: the handler had no room.
    failed: the handler raised, or a question was not answered. refused_sends: peer unknown, gone, or not
    reading. late_answers: nobody waited. rescued: messages that only the watchdog found.
    """

    received: int = 0
    sent: int = 0
    bad_frames: int = 0
    undelivered: int = 0
    failed: int = 0
    refused_sends: int = 0
    late_answers: int = 0
    rescued: int = 0
    connects: int = 0
    disconnects: int = 0


class Endpoint(ABC, Generic[In]):
    """One socket, of the event loop's thread. Subclasses say how peers are named."""

    def __init__(
        self,
        address: str,
        accepts: Any,
        deliver: Callable[[str, In], None],
        answer: Callable[[str, In], Awaitable[object]] | None,
        limits: Limits,
    ) -> None:
        self.address = address
        self.counters = Counters()
        self._limits = limits
        self._deliver = deliver
        self._answer = answer
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(accepts)
        self._answer_decoder: msgspec.msgpack.Decoder[In | None] = msgspec.msgpack.Decoder(accepts | None)
        self._encoder = msgspec.msgpack.Encoder()
        self._questions = Questions()
        self._answering: set[asyncio.Task[None]] = set()
        self._bad = QuietLog(log)
        self._loop = asyncio.get_running_loop()
        self._drain_is_due = False
        self._poll = select.poll()

    def _open(self, kind: int, options: dict[int, int | bytes]) -> None:
        # A context of its own lets close() wait until libzmq has let go of the socket file.
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        common = {
            zmq.LINGER: 0,
            zmq.SNDHWM: self._limits.high_water,
            zmq.RCVHWM: self._limits.high_water,
            zmq.MAXMSGSIZE: self._limits.max_frame_bytes,
        }
        for option, value in (common | options).items():
            self._socket.setsockopt(option, value)
        self._monitor = ConnectionMonitor(self._socket, self._on_connected, self._on_disconnected)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._poll.register(self._fd, select.POLLIN)
        self._loop.add_reader(self._fd, self._drain)
        self._watchdog = self._loop.call_later(self._limits.watchdog_s, self._watch)
        try:
            self._attach()
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"socket {self.address} cannot be opened: {error}") from error
        self._drain_soon()

    @abstractmethod
    def _attach(self) -> None:
        """Bind or connect."""

    @abstractmethod
    def _split(self, received: list[bytes]) -> tuple[str, list[bytes]]:
        """The peer and its frames. Raises BadFrames."""

    @abstractmethod
    def _route(self, peer: str) -> list[bytes]:
        """Frames in front of those for a peer."""

    @abstractmethod
    def _on_refused(self, peer: str) -> None:
        """The socket did not take a message for this peer."""

    def _on_connected(self) -> None:
        self.counters.connects += 1

    def _on_disconnected(self) -> None:
        self.counters.disconnects += 1

    def close(self) -> None:
        """Close the socket, give up what is queued, fail open questions with PeerLost. Idempotent."""
        if self._socket.closed:
            return
        self._watchdog.cancel()
        self._loop.remove_reader(self._fd)
        for task in self._answering:
            task.cancel()
        self._questions.lose_all()
        self._monitor.close()
        self._socket.close(linger=0)
        self._context.term()

    # Sending

    def _send(self, peer: str, body: Body) -> bool:
        parts = self._route(peer) + frames.pack(body)
        if len(body.payload) > self._limits.max_frame_bytes:
            raise TransportError(
                f"message of {len(body.payload)} bytes to {peer}, the limit is {self._limits.max_frame_bytes}"
            )
        if self._socket.closed:
            return False
        try:
            self._send_parts(parts)
        except zmq.ZMQError:
            self.counters.refused_sends += 1
            self._on_refused(peer)
            return False
        finally:
            self._drain_soon()
        self.counters.sent += 1
        return True

    def _send_parts(self, parts: list[bytes]) -> None:
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.ZMQError:
            # libzmq looks for new connections and returned credit only now and then; this makes it look.
            self._socket.getsockopt(zmq.EVENTS)
            self._socket.send_multipart(parts, zmq.DONTWAIT)

    def _told(self, message: object) -> Body:
        return Body(Kind.TOLD, 0, self._encoder.encode(message))

    def _ref(self, peer: str) -> RemoteRef[Any]:
        def send(message: object) -> bool:
            return self._send(peer, self._told(message))

        def send_question(number: int, message: object) -> bool:
            return self._send(peer, Body(Kind.QUESTION, number, self._encoder.encode(message)))

        return RemoteRef(peer, self._questions, send, send_question)

    # Receiving

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> int:
        self._drain_is_due = False
        for count in range(DRAIN_BATCH):
            if self._socket.closed:
                return count
            try:
                received = self._receive()
            except zmq.ZMQError:
                return count
            self._handle(received)
        self._drain_soon()
        return DRAIN_BATCH

    def _receive(self) -> list[bytes]:
        kept = [self._socket.recv(zmq.DONTWAIT)]
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(zmq.DONTWAIT)
            if len(kept) <= 1 + frames.MAX_BODY_FRAMES:  # one too many is enough to tell
                kept.append(frame)
        return kept

    def _watch(self) -> None:
        self._watchdog = self._loop.call_later(self._limits.watchdog_s, self._watch)
        self._monitor.drain()
        wake_up_is_due = bool(self._poll.poll(0))
        found = self._drain()
        if not wake_up_is_due:
            self.counters.rescued += found

    def _handle(self, received: list[bytes]) -> None:
        try:
            peer, rest = self._split(received)
            body = frames.parse(rest)
            if body.kind is Kind.FAILURE:
                self._on_failure(peer, body)
            elif body.kind is Kind.ANSWER:
                self._on_answer(peer, body)
            else:
                self._on_message(peer, body)
        except BadFrames as error:
            self.counters.bad_frames += 1
            self._bad.warning(f"{self.address}: dropped a message: {error}")

    def _decode(self, decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except Exception as error:  # whatever decoding does with a stranger's bytes, it ends here
            raise BadFrames(f"{len(payload)} bytes are no message of this conversation: {error}") from error

    def _on_answer(self, peer: str, body: Body) -> None:
        if not self._questions.answer(peer, body.number, self._decode(self._answer_decoder, body.payload)):
            self.counters.late_answers += 1

    def _on_failure(self, peer: str, body: Body) -> None:
        reason = body.payload[: frames.MAX_REASON_BYTES].decode("utf-8", "replace")
        if not self._questions.fail(peer, body.number, reason):
            self.counters.late_answers += 1

    def _on_message(self, peer: str, body: Body) -> None:
        message: In = self._decode(self._decoder, body.payload)
        self.counters.received += 1
        if body.kind is Kind.QUESTION:
            self._take_question(peer, body.number, message)
            return
        try:
            self._deliver(peer, message)
        except Undeliverable as error:
            self.counters.undelivered += 1
            self._bad.warning(f"{self.address}: {type(message).__name__} from {peer} dropped: {error}")
        except Exception:  # a handler's bug must not stop the reading of other messages
            self.counters.failed += 1
            log.exception("%s: handling %s from %s failed", self.address, type(message).__name__, peer)

    def _take_question(self, peer: str, number: int, message: In) -> None:
        if self._answer is None:
            self._fail_question(peer, number, "takes no questions")
        elif len(self._answering) >= MAX_QUESTIONS_IN_WORK:
            self._fail_question(peer, number, f"works on {MAX_QUESTIONS_IN_WORK} questions already")
        else:
            task = self._loop.create_task(self._work_on_question(self._answer, peer, number, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _work_on_question(
        self, answer: Callable[[str, In], Awaitable[object]], peer: str, number: int, message: In
    ) -> None:
        try:
            payload = self._encoder.encode(await answer(peer, message))
            self._send(peer, Body(Kind.ANSWER, number, payload))
        except Exception as error:  # the asker is to hear of any failure
            self._fail_question(peer, number, repr(error))

    def _fail_question(self, peer: str, number: int, reason: str) -> None:
        self.counters.failed += 1
        payload = reason.encode("utf-8", "replace")[: frames.MAX_REASON_BYTES]
        self._send(peer, Body(Kind.FAILURE, number, payload))
