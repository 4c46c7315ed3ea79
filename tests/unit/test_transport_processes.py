"""Two real processes: what the death of one does to the other's socket."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from common.actors.errors import PeerLost
from common.actors.frames import identity
from common.actors.transport import DealerEndpoint, RouterEndpoint
from common.messages.lifecycle import Heartbeat

pytestmark = pytest.mark.timeout(60)

PEER = """
import asyncio, sys
import uvloop
from common.actors.frames import identity
from common.actors.transport import DealerEndpoint, RouterEndpoint
from common.messages.lifecycle import Heartbeat

async def serve(role, address, incarnation):
    hello = Heartbeat(1, incarnation, 0, False)
    forever = asyncio.get_running_loop().create_future()
    if role == "dealer":
        endpoint = DealerEndpoint(
            address, identity("draft", incarnation), accepts=Heartbeat,
            on_message=lambda message: endpoint.send(message),
            on_question=lambda message: forever,
            on_connected=lambda: endpoint.send(hello),
        )
    else:
        endpoint = RouterEndpoint(
            address, accepts=Heartbeat,
            on_message=lambda peer, message: endpoint.send(peer, message),
            on_question=lambda peer, message: forever,
        )
    await forever

uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

Start = Callable[[str, str, int], Awaitable[Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    processes: list[Process] = []

    async def start_peer(role: str, address: str, incarnation: int) -> Process:
        command = [sys.executable, "-c", PEER, role, address, str(incarnation)]
        process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2], stdin=PIPE)
        processes.append(process)
        return process

    yield start_peer
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_killed_dealer_is_lost_and_its_successor_is_served(tmp_path: Path, start: Start) -> None:
    got: asyncio.Queue[tuple[str, Heartbeat]] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()
    router: RouterEndpoint[Heartbeat] = RouterEndpoint(
        f"ipc://{tmp_path}/run/a.sock",
        accepts=Heartbeat,
        on_message=lambda peer, message: got.put_nowait((peer, message)),
        on_peer_lost=lost.put_nowait,
    )
    first, second = identity("draft", 1), identity("draft", 2)
    process = await start("dealer", router.address, 1)
    assert await got.get() == (first, Heartbeat(1, 1, 0, False))
    assert router.send(first, Heartbeat(1, 1, 5, True))
    assert await got.get() == (first, Heartbeat(1, 1, 5, True))

    question = asyncio.ensure_future(router.ref(first).ask(Heartbeat(1, 1, 6, True), 3600))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    # As heartbeats do, until one finds the peer gone.
    while router.send(first, Heartbeat(1, 1, 7, True)):
        await asyncio.sleep(0.001)
    assert await lost.get() == first
    with pytest.raises(PeerLost):
        await question

    await start("dealer", router.address, 2)
    assert await got.get() == (second, Heartbeat(1, 2, 0, False))
    assert router.send(second, Heartbeat(1, 2, 1, True))
    assert await got.get() == (second, Heartbeat(1, 2, 1, True))
    router.close()


async def test_a_killed_router_is_lost_and_its_successor_is_found(tmp_path: Path, start: Start) -> None:
    got: asyncio.Queue[Heartbeat] = asyncio.Queue()
    connected, lost = asyncio.Event(), asyncio.Event()
    dealer: DealerEndpoint[Heartbeat] = DealerEndpoint(
        f"ipc://{tmp_path}/run/a.sock",
        identity("draft", 1),
        accepts=Heartbeat,
        on_message=got.put_nowait,
        on_connected=connected.set,
        on_lost=lost.set,
    )
    process = await start("router", dealer.address, 1)
    await connected.wait()
    connected.clear()
    assert dealer.send(Heartbeat(1, 1, 5, True))
    assert await got.get() == Heartbeat(1, 1, 5, True)

    question = asyncio.ensure_future(dealer.ref().ask(Heartbeat(1, 1, 6, True), 3600))
    await asyncio.sleep(0)
    process.send_signal(signal.SIGKILL)
    await lost.wait()
    with pytest.raises(PeerLost):
        await question
    # libzmq may still take one in the moment in which it lets go of the connection.
    while dealer.send(Heartbeat(1, 1, 7, True)):
        await asyncio.sleep(0.001)
    assert os.path.exists(tmp_path / "run" / "a.sock")

    await start("router", dealer.address, 2)
    await connected.wait()
    assert dealer.send(Heartbeat(1, 1, 8, True))
    assert await got.get() == Heartbeat(1, 1, 8, True)
    dealer.close()


async def test_a_peer_that_is_stopped_and_does_not_read_is_lost(tmp_path: Path, start: Start) -> None:
    got: asyncio.Queue[str] = asyncio.Queue()
    lost: asyncio.Queue[str] = asyncio.Queue()
    router: RouterEndpoint[Heartbeat] = RouterEndpoint(
        f"ipc://{tmp_path}/run/a.sock",
        accepts=Heartbeat,
        on_message=lambda peer, message: got.put_nowait(peer),
        on_peer_lost=lost.put_nowait,
    )
    process = await start("dealer", router.address, 1)
    peer = await got.get()
    process.send_signal(signal.SIGSTOP)
    sent = 0
    while router.send(peer, Heartbeat(1, 1, sent, True)):
        sent += 1
    assert await lost.get() == peer
    router.close()
