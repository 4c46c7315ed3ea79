import asyncio
import gc
import threading
import weakref

import pytest

from common.actors.actor import Actor
from common.actors.device import DeviceDone, DeviceFailed, DeviceStopped, DeviceStuck, DeviceThread
from common.actors.errors import MailboxFull
from common.actors.supervisor import Supervisor


class Collector(Actor[object]):
    def __init__(self, got: asyncio.Queue[object]) -> None:
        self.got = got

    async def receive(self, message: object) -> None:
        self.got.put_nowait(message)


async def take(got: asyncio.Queue[object]) -> object:
    async with asyncio.timeout(10):
        return await got.get()


async def test_results_reach_the_mailbox_in_order_from_one_thread() -> None:
    got: asyncio.Queue[object] = asyncio.Queue()
    threads: set[int] = set()

    def work(number: int) -> int:
        threads.add(threading.get_ident())
        return number * 10

    async with Supervisor() as actors:
        ref = actors.spawn("collector", lambda: Collector(got))
        device = DeviceThread("device")
        for number in range(3):
            device.submit(lambda number=number: work(number), ref, ("round", number))
        assert device.busy
        assert [await take(got) for _ in range(3)] == [DeviceDone(("round", n), n * 10) for n in range(3)]
        assert (device.busy, device.finished) == (False, 3)
        await device.stop(10)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("error", [ValueError("bad rows"), SystemExit(3), KeyboardInterrupt()])
async def test_an_exception_becomes_a_message_and_the_thread_goes_on(error: BaseException) -> None:
    got: asyncio.Queue[object] = asyncio.Queue()

    def fail() -> None:
        raise error

    async with Supervisor() as actors:
        ref = actors.spawn("collector", lambda: Collector(got))
        device = DeviceThread("device")
        device.submit(fail, ref, 1)
        failure = await take(got)
        assert isinstance(failure, DeviceFailed)
        assert (failure.tag, failure.error) == (1, repr(error))
        assert "in fail" in failure.trace
        assert await device.run(lambda: 7) == 7
        await device.stop(10)


async def test_run_raises_what_the_work_raised() -> None:
    device = DeviceThread("device")
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 // 0)
    await device.stop(10)


async def test_stopping_fails_what_waits_and_refuses_what_comes() -> None:
    got: asyncio.Queue[object] = asyncio.Queue()
    entered, gate = threading.Event(), threading.Event()

    def hold() -> str:
        entered.set()
        gate.wait()
        return "held"

    async with Supervisor() as actors:
        ref = actors.spawn("collector", lambda: Collector(got))
        device = DeviceThread("device")
        device.submit(hold, ref, "running")
        device.submit(lambda: "never", ref, "waiting")
        await asyncio.to_thread(entered.wait)
        with pytest.raises(DeviceStuck, match=r"'device' still works after 0.01 s"):
            await device.stop(0.01)
        with pytest.raises(DeviceStopped):
            device.submit(lambda: "never", ref, "late")
        gate.set()
        await device.stop(10)
        await device.stop(10)
        assert await take(got) == DeviceDone("running", "held")
        dropped = await take(got)
        assert isinstance(dropped, DeviceFailed)
        assert dropped.tag == "waiting"
        assert not device.busy


async def test_more_work_than_may_wait_is_refused() -> None:
    gate = threading.Event()
    async with Supervisor() as actors:
        ref = actors.spawn("collector", lambda: Collector(asyncio.Queue()))
        device = DeviceThread("device", max_waiting=1)
        device.submit(gate.wait, ref, 1)
        device.submit(gate.wait, ref, 2)
        with pytest.raises(MailboxFull, match="1 works waiting"):
            device.submit(gate.wait, ref, 3)
        gate.set()
        await device.stop(10)


async def test_a_finished_work_leaves_nothing_of_itself_alive() -> None:
    class Rows:
        pass

    got: asyncio.Queue[object] = asyncio.Queue()
    rows = Rows()
    alive = weakref.ref(rows)

    def fail(rows: Rows) -> None:
        raise ValueError

    async with Supervisor() as actors:
        ref = actors.spawn("collector", lambda: Collector(got))
        device = DeviceThread("device")
        device.submit(lambda rows=rows: fail(rows), ref, 1)
        del rows
        await take(got)
        async with asyncio.timeout(10):
            while alive() is not None:  # the thread lets go a moment after it has delivered
                gc.collect()
                await asyncio.sleep(0.001)
        await device.stop(10)
