import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from common.actors import quiet
from common.actors.endpoint import Limits, TransportError
from common.actors.errors import ActorStopped, AskTimeout, MailboxFull, PeerLost
from common.actors.frames import identity
from common.actors.ipc import AddressError
from common.actors.quiet import QuietLog
from common.actors.transport import DealerEndpoint, RouterEndpoint

pytestmark = pytest.mark.timeout(30)

DRAFT = identity("draft", 1)


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Text(msgspec.Struct, frozen=True, array_like=True, tag=True):
    text: str


Conversation = Ping | Text


class Pair:
    """A router and a dealer on one loop; what each of them got."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.at_router: asyncio.Queue[tuple[str, object]] = asyncio.Queue()
        self.at_dealer: asyncio.Queue[object] = asyncio.Queue()
        self.lost_peers: asyncio.Queue[str] = asyncio.Queue()
        self.connected, self.lost = asyncio.Event(), asyncio.Event()
        self.handle: Callable[[str, object], None] = lambda peer, message: self.at_router.put_nowait(
            (peer, message)
        )
        self._closers: list[Callable[[], None]] = []

    def router(
        self,
        limits: Limits | None = None,
        on_question: Callable[[str, Conversation], Awaitable[object]] | None = None,
    ) -> RouterEndpoint[Conversation]:
        endpoint: RouterEndpoint[Conversation] = RouterEndpoint(
            self.address,
            accepts=Conversation,
            on_message=lambda peer, message: self.handle(peer, message),
            on_question=on_question,
            on_peer_lost=self.lost_peers.put_nowait,
            limits=limits,
        )
        self._closers.append(endpoint.close)
        return endpoint

    def dealer(
        self,
        limits: Limits | None = None,
        on_question: Callable[[Conversation], Awaitable[object]] | None = None,
    ) -> DealerEndpoint[Conversation]:
        endpoint: DealerEndpoint[Conversation] = DealerEndpoint(
            self.address,
            DRAFT,
            accepts=Conversation,
            on_message=self.at_dealer.put_nowait,
            on_question=on_question,
            on_connected=self.connected.set,
            on_lost=self.lost.set,
            limits=limits,
        )
        self._closers.append(endpoint.close)
        return endpoint

    def files(self) -> list[Path]:
        return list(Path(self.address.removeprefix("ipc://")).parent.iterdir())

    def close(self) -> None:
        for close in self._closers:
            close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(f"ipc://{tmp_path}/run/a.sock")
    yield pair
    pair.close()


@pytest.fixture
def raw() -> Iterator[Callable[[int, str, bytes], "zmq.Socket[bytes]"]]:
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []  # one that nobody holds is closed

    def make(kind: int, address: str, name: bytes = b"") -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        if name:
            socket.setsockopt(zmq.ROUTING_ID, name)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        (socket.bind if kind == zmq.ROUTER else socket.connect)(address)
        sockets.append(socket)
        return socket

    yield make
    context.destroy(linger=0)


async def until(holds: Callable[[], bool]) -> None:
    """For what changes a counter and nothing else."""
    while not holds():
        await asyncio.sleep(0.001)


async def connect(
    pair: Pair, **limits: Limits
) -> tuple[RouterEndpoint[Conversation], DealerEndpoint[Conversation]]:
    router, dealer = pair.router(limits.get("router")), pair.dealer(limits.get("dealer"))
    await pair.connected.wait()
    assert dealer.send(Ping(0))
    assert await pair.at_router.get() == (DRAFT, Ping(0))
    return router, dealer


async def test_messages_go_both_ways_in_order(pair: Pair) -> None:
    router, dealer = await connect(pair)
    for number in range(200):
        assert dealer.send(Ping(number))
        assert router.send(DRAFT, Text(str(number)))
    assert [await pair.at_router.get() for _ in range(200)] == [(DRAFT, Ping(n)) for n in range(200)]
    assert [await pair.at_dealer.get() for _ in range(200)] == [Text(str(n)) for n in range(200)]
    assert (router.counters.received, router.counters.sent, router.counters.rescued) == (201, 200, 0)


GARBAGE = [
    [b""],
    [b"\xc1"],
    [b"not msgpack"],
    [msgspec.msgpack.encode({"Ping": 1})],
    [msgspec.msgpack.encode(["Ping", "not a number"])],
    [msgspec.msgpack.encode(["Pong", 1])],
    [msgspec.msgpack.encode(["Ping", 1]) + b"\0"],
    [msgspec.msgpack.encode(["Text", ""])[:-1] + b"\xa1\xff"],
    [b"\x91" * 100_000 + b"\0"],
    [b"\xdd\xff\xff\xff\xff"],
    [b"a", b"b"],
    [b"", b"", b""],
    [b"x"] * 1000,
    [b"A" + bytes(8), msgspec.msgpack.encode(["Pong", 1])],
]


async def test_garbage_at_a_router_is_counted_and_nothing_else(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    router = pair.router()
    stranger = raw(zmq.DEALER, pair.address, DRAFT.encode())
    for frames in GARBAGE:
        stranger.send_multipart(frames)
    stranger.send(msgspec.msgpack.encode(Ping(1)))
    assert await pair.at_router.get() == (DRAFT, Ping(1))
    assert router.counters.bad_frames == len(GARBAGE)
    assert router.counters.received == 1
    assert router.counters.failed == 0


async def test_garbage_at_a_dealer_is_counted_and_nothing_else(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    Path(pair.address.removeprefix("ipc://")).parent.mkdir()
    stranger = raw(zmq.ROUTER, pair.address)
    dealer = pair.dealer()
    await pair.connected.wait()
    dealer.send(Ping(0))
    assert stranger.recv_multipart()[0] == DRAFT.encode()
    for frames in GARBAGE:
        stranger.send_multipart([DRAFT.encode(), *frames])
    stranger.send_multipart([DRAFT.encode(), msgspec.msgpack.encode(Ping(1))])
    assert await pair.at_dealer.get() == Ping(1)
    assert (dealer.counters.bad_frames, dealer.counters.received) == (len(GARBAGE), 1)


@pytest.mark.parametrize("name", [b"", b"someone", b"\xff" * 200])
async def test_a_peer_without_a_proper_identity_is_not_heard(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]], name: bytes
) -> None:
    router = pair.router()
    raw(zmq.DEALER, pair.address, name).send(msgspec.msgpack.encode(Ping(1)))
    raw(zmq.DEALER, pair.address, DRAFT.encode()).send(msgspec.msgpack.encode(Ping(2)))
    await until(lambda: router.counters.bad_frames + router.counters.received == 2)
    assert pair.at_router.get_nowait() == (DRAFT, Ping(2))
    assert router.counters.bad_frames == 1


async def test_a_peer_that_sends_too_large_a_frame_is_disconnected(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    router, _ = await connect(pair, router=Limits(max_frame_bytes=1000))
    stranger = raw(zmq.DEALER, pair.address, identity("draft", 2).encode())
    stranger.send(msgspec.msgpack.encode(Text("x" * 900)))
    await pair.at_router.get()
    stranger.send(msgspec.msgpack.encode(Text("x" * 1000)))
    await until(lambda: router.counters.disconnects == 1)
    assert router.counters.received == 2
    assert router.send(DRAFT, Ping(1))
    assert await pair.at_dealer.get() == Ping(1)


async def test_an_own_message_over_the_limit_is_an_error_that_says_so(pair: Pair) -> None:
    router, _ = await connect(pair, router=Limits(max_frame_bytes=1000))
    with pytest.raises(TransportError, match=f"bytes to {DRAFT}, the limit is 1000"):
        router.send(DRAFT, Text("x" * 1000))


async def test_a_send_to_a_peer_that_is_not_there_is_refused_and_reported(pair: Pair) -> None:
    router = pair.router()
    assert not router.send(DRAFT, Ping(1))
    assert await pair.lost_peers.get() == DRAFT
    assert (router.counters.refused_sends, router.counters.sent) == (1, 0)
    with pytest.raises(PeerLost, match="does not take Ping"):
        router.ref(DRAFT).tell(Ping(1))


async def test_nothing_is_kept_for_a_router_that_is_not_there(pair: Pair) -> None:
    dealer = pair.dealer()
    assert not dealer.send(Ping(1))
    assert not dealer.connected
    pair.router()
    await pair.connected.wait()
    assert dealer.connected
    assert dealer.send(Ping(2))
    assert await pair.at_router.get() == (DRAFT, Ping(2))


async def test_a_connection_is_noticed_without_the_watchdog(pair: Pair) -> None:
    pair.router(Limits(watchdog_s=3600.0))
    dealer = pair.dealer(Limits(watchdog_s=3600.0))
    await pair.connected.wait()
    assert dealer.connected


class Hesitant:
    """A socket that takes a message only after it was made to look for connections, as libzmq may."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._real = socket
        self._has_looked = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def getsockopt(self, option: int) -> object:
        self._has_looked |= option == zmq.EVENTS
        return self._real.getsockopt(option)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        if not self._has_looked:
            raise zmq.Again
        self._real.send_multipart(frames, flags)


async def test_a_connection_that_libzmq_has_not_looked_for_yet_is_used(pair: Pair) -> None:
    _, dealer = await connect(pair)
    dealer._socket = Hesitant(dealer._socket)  # type: ignore[assignment]
    assert dealer.send(Ping(1))
    assert await pair.at_router.get() == (DRAFT, Ping(1))


async def test_a_dealer_hears_that_its_router_went_and_came_back(pair: Pair) -> None:
    router, dealer = await connect(pair)
    pair.connected.clear()
    router.close()
    await pair.lost.wait()
    assert not dealer.send(Ping(1))
    pair.router()
    await pair.connected.wait()
    assert dealer.send(Ping(2))
    assert await pair.at_router.get() == (DRAFT, Ping(2))


async def test_a_router_peer_that_does_not_read_is_lost(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    router = pair.router(Limits(high_water=2))
    deaf = raw(zmq.DEALER, pair.address, DRAFT.encode())
    deaf.send(msgspec.msgpack.encode(Ping(0)))
    await pair.at_router.get()
    for _ in range(10_000):
        if not router.send(DRAFT, Text("x" * 65536)):
            break
    assert await pair.lost_peers.get() == DRAFT


async def test_a_dealer_drops_what_waits_for_a_router_that_does_not_read(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    Path(pair.address.removeprefix("ipc://")).parent.mkdir()
    raw(zmq.ROUTER, pair.address)
    dealer = pair.dealer(Limits(high_water=2))
    await pair.connected.wait()
    pair.connected.clear()
    for _ in range(10_000):
        if not dealer.send(Text("x" * 65536)):
            break
    await pair.lost.wait()
    await pair.connected.wait()
    assert dealer.send(Ping(1))


async def test_a_handler_that_fails_or_has_no_room_costs_its_message_only(pair: Pair) -> None:
    router, dealer = await connect(pair)
    put = pair.handle

    def handle(peer: str, message: object) -> None:
        if message == Ping(1):
            raise MailboxFull
        if message == Ping(2):
            raise ValueError
        put(peer, message)

    pair.handle = handle
    for number in (1, 2, 3):
        dealer.send(Ping(number))
    assert await pair.at_router.get() == (DRAFT, Ping(3))
    assert (router.counters.undelivered, router.counters.failed) == (1, 1)


def swallow_wake_up(endpoint: RouterEndpoint[Conversation]) -> None:
    """Wait for a message in a way that takes the wake-up from the loop, as any call on the socket may."""
    while not endpoint._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        pass


async def test_a_send_does_not_lose_the_wake_up_of_a_message(pair: Pair) -> None:
    router, dealer = await connect(pair, router=Limits(watchdog_s=3600.0))
    dealer.send(Ping(1))
    swallow_wake_up(router)
    router.send(DRAFT, Ping(2))
    assert await pair.at_router.get() == (DRAFT, Ping(1))


async def test_the_watchdog_finds_a_message_whose_wake_up_was_lost(pair: Pair) -> None:
    router, dealer = await connect(pair, router=Limits(watchdog_s=0.01))
    dealer.send(Ping(1))
    swallow_wake_up(router)
    assert await pair.at_router.get() == (DRAFT, Ping(1))
    assert router.counters.rescued == 1


async def double(message: Conversation) -> object:
    assert isinstance(message, Ping)
    if message.number < 0:
        raise ActorStopped("no roots here")
    return Ping(message.number * 2)


async def test_questions_are_answered_both_ways(pair: Pair) -> None:
    router = pair.router(on_question=lambda peer, message: double(message))
    dealer = pair.dealer(on_question=double)
    await pair.connected.wait()
    assert await dealer.ref().ask(Ping(4), 10) == Ping(8)
    assert await router.ref(DRAFT).ask(Ping(5), 10) == Ping(10)
    answers = await asyncio.gather(*(dealer.ref().ask(Ping(n), 10) for n in range(50)))
    assert answers == [Ping(2 * n) for n in range(50)]


async def test_the_asker_hears_that_the_other_side_failed_or_takes_no_questions(pair: Pair) -> None:
    router = pair.router(on_question=lambda peer, message: double(message))
    dealer = pair.dealer()
    await pair.connected.wait()
    with pytest.raises(ActorStopped, match="no roots here"):
        await dealer.ref().ask(Ping(-1), 10)
    with pytest.raises(ActorStopped, match="takes no questions"):
        await router.ref(DRAFT).ask(Ping(1), 10)


async def test_a_remote_question_ends_in_time_and_a_late_answer_is_counted(pair: Pair) -> None:
    gate = asyncio.Event()

    async def late(peer: str, message: Conversation) -> object:
        await gate.wait()
        return message

    pair.router(on_question=late)
    dealer = pair.dealer()
    await pair.connected.wait()
    with pytest.raises(AskTimeout, match="did not answer Ping within"):
        await dealer.ref().ask(Ping(1), 0.01)
    gate.set()
    assert await dealer.ref().ask(Ping(2), 10) == Ping(2)
    assert dealer.counters.late_answers == 1


async def test_an_open_question_ends_when_the_peer_is_lost_or_the_socket_closed(pair: Pair) -> None:
    asked = asyncio.Event()

    async def never(peer: str, message: Conversation) -> object:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    router = pair.router(on_question=never)
    dealer = pair.dealer(on_question=lambda message: never("", message))
    await pair.connected.wait()
    question = asyncio.ensure_future(dealer.ref().ask(Ping(1), 3600))
    await asked.wait()
    asked.clear()
    back = asyncio.ensure_future(router.ref(DRAFT).ask(Ping(1), 3600))
    await asked.wait()
    router.close()
    for waiting in (question, back):
        with pytest.raises(PeerLost):
            await waiting
    with pytest.raises(PeerLost):
        await router.ref(DRAFT).ask(Ping(1), 3600)


async def test_closing_leaves_no_socket_file_and_can_be_repeated(pair: Pair) -> None:
    router, dealer = await connect(pair)
    assert [file.name for file in pair.files()] == ["a.sock"]
    for _ in range(2):
        router.close()
        dealer.close()
    assert pair.files() == []
    assert not router.send(DRAFT, Ping(1))


async def test_an_address_in_use_is_refused(pair: Pair) -> None:
    await connect(pair)
    with pytest.raises(AddressError, match="another process listens on"):
        pair.router()


async def test_a_peer_that_comes_back_under_its_identity_takes_it_over(
    pair: Pair, raw: Callable[..., zmq.Socket[bytes]]
) -> None:
    router = pair.router()
    raw(zmq.DEALER, pair.address, DRAFT.encode()).send(msgspec.msgpack.encode(Ping(1)))
    await pair.at_router.get()
    second = raw(zmq.DEALER, pair.address, DRAFT.encode())
    second.send(msgspec.msgpack.encode(Ping(2)))
    await pair.at_router.get()
    assert router.send(DRAFT, Ping(3))
    assert msgspec.msgpack.decode(second.recv(), type=Conversation) == Ping(3)


def test_repeated_warnings_are_held_back_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(quiet.time, "monotonic", lambda: now_s)
    log = QuietLog(logging.getLogger("quiet"))
    for _ in range(4):
        log.warning("bad frame")
    now_s += quiet.INTERVAL_S
    log.warning("bad frame")
    log.warning("bad frame")
    assert caplog.messages == ["bad frame", "bad frame (and 3 more like it)"]
