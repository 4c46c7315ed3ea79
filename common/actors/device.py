"""The one thread of a process that runs model code."""

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from common.actors.actor import ActorRef
from common.actors.errors import MailboxFull, Undeliverable

log = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DeviceDone:
    """A submitted work returned value. tag: given at submission."""

    tag: object
    value: Any


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """A submitted work raised, or was dropped because the thread stops. Text only: a traceback object would
    keep the tensors of the failed forward alive."""

    tag: object
    error: str
    trace: str


class DeviceStopped(Undeliverable):
    """The device thread takes no more work."""


class DeviceStuck(Exception):
    """The device thread did not end in time."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    succeed: Callable[[Any], None]
    fail: Callable[[BaseException, str], None]


class DeviceThread:
    """Runs submitted work in order, one at a time. Results and failures come back on the event loop.

    busy: work runs or waits. finished: works that ended, in any way.
    """

    def __init__(self, name: str, *, max_waiting: int = 8) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._submitted = 0
        self.finished = 0
        self._stopping = False
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self.finished < self._submitted

    def submit(self, work: Callable[[], Any], deliver_to: ActorRef[Any], tag: object) -> None:
        """Run work; deliver_to gets DeviceDone or DeviceFailed with this tag.

        Raises MailboxFull if max_waiting works wait, DeviceStopped after `stop`.
        """

        def succeed(value: Any) -> None:
            deliver_to.post(DeviceDone(tag, value))

        def fail(error: BaseException, trace: str) -> None:
            deliver_to.post(DeviceFailed(tag, repr(error), trace))

        self._put(_Job(work, succeed, fail))

    async def run(self, work: Callable[[], R]) -> R:
        """Run work and wait for its value; raises what it raised. For start-up, where nothing else waits."""
        future: asyncio.Future[R] = self._loop.create_future()

        def succeed(value: R) -> None:
            if not future.done():
                future.set_result(value)

        def fail(error: BaseException, trace: str) -> None:
            if not future.done():
                future.set_exception(error)

        self._put(_Job(work, succeed, fail))
        return await future

    async def stop(self, timeout_s: float) -> None:
        """Let the running work end, fail what waits, and join the thread. Idempotent.

        Raises DeviceStuck if the running work goes on for more than timeout_s; the thread then ends with the
        process.
        """
        if not self._stopping:
            self._stopping = True
            self._jobs.put(None)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            raise DeviceStuck(f"device thread {self._name!r} still works after {timeout_s} s") from None
        self._thread.join()

    def _put(self, job: _Job) -> None:
        if self._stopping:
            raise DeviceStopped(f"device thread {self._name!r} has stopped")
        if self._submitted - self.finished > self._max_waiting:
            raise MailboxFull(f"device thread {self._name!r} has {self._max_waiting} works waiting")
        self._submitted += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._perform(job)
            del job  # the closure may hold tensors, and the next job may be long in coming
        self._on_loop(self._ended.set)

    def _perform(self, job: _Job) -> None:
        if self._stopping:
            self._finish(
                job.fail, DeviceStopped(f"device thread {self._name!r} stopped before this work"), ""
            )
            return
        try:
            value = job.work()
        except BaseException as error:  # a thread that dies would leave every later waiter without an answer
            trace = traceback.format_exc()
            self._finish(job.fail, error, trace)
        else:
            self._finish(job.succeed, value)

    def _finish(self, deliver: Callable[..., None], *outcome: object) -> None:
        def on_loop() -> None:
            self.finished += 1
            deliver(*outcome)

        self._on_loop(on_loop)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.warning(
                "device thread %r ended after its event loop; a result is lost with the loop", self._name
            )
