"""Keeps actors running: a failed one is replaced after a pause, one that keeps failing is escalated."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from common.actors.actor import Actor, ActorContext, ActorRef
from common.actors.errors import ActorStopped
from common.actors.mailbox import Envelope, Mailbox
from common.actors.timers import Timers

log = logging.getLogger(__name__)

M = TypeVar("M")

DEFAULT_MAILBOX_CAPACITY = 1024
DEFAULT_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The first restart comes after first_pause_s, each further one within window_s after twice that, up to
    longest_pause_s. The failure numbered max_failures within window_s escalates."""

    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    max_failures: int = 5
    window_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """failures: how many within the window, this one included."""
        return min(self.first_pause_s * 2.0 ** (failures - 1), self.longest_pause_s)


class Escalation(Exception):
    """An actor failed too often. __cause__ is its last failure."""


class _Child(Generic[M]):
    def __init__(
        self,
        name: str,
        make: Callable[[], Actor[M]],
        mailbox: Mailbox[M],
        policy: RestartPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.ref = ActorRef(name, mailbox)
        self._make = make
        self._mailbox = mailbox
        self._policy = policy
        self._clock = clock
        self._failures: deque[float] = deque()
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Until the mailbox is closed. Raises Escalation."""
        try:
            while not self._closing.is_set():
                try:
                    await self._run_instance()
                except (Exception, asyncio.CancelledError) as error:
                    # A CancelledError that was not meant for this task comes from something that the actor
                    # awaited: a failure like any other.
                    if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                        raise
                    await self._pause(self._pause_s(error), error)
        finally:
            self.close()

    def _pause_s(self, error: BaseException) -> float:
        now = self._clock()
        self._failures.append(now)
        while self._failures[0] < now - self._policy.window_s:
            self._failures.popleft()
        count = len(self._failures)
        if count >= self._policy.max_failures:
            raise Escalation(
                f"actor {self.ref.name!r} failed {count} times within {self._policy.window_s} s: {error!r}"
            ) from error
        return self._policy.pause_s(count)

    async def _pause(self, pause_s: float, error: BaseException) -> None:
        log.error("actor %r failed and starts again in %.1f s", self.ref.name, pause_s, exc_info=error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._closing.wait()

    async def _run_instance(self) -> None:
        actor = self._make()
        timers: Timers[M] = Timers(self.ref.post)
        try:
            await actor.started(ActorContext(self.ref, timers))
            while (envelope := await self._mailbox.next()) is not None:
                await self._handle(actor, envelope)
        finally:
            timers.cancel_all()
            await self._run_stopped_hook(actor)

    async def _handle(self, actor: Actor[M], envelope: Envelope[M]) -> None:
        answer = envelope.answer
        try:
            result = await actor.receive(envelope.message)
        except BaseException as error:
            if answer is not None and not answer.done():
                stopped = ActorStopped(f"actor {self.ref.name!r} failed on the question: {error!r}")
                stopped.__cause__ = error
                answer.set_exception(stopped)
            raise
        if answer is not None and not answer.done():
            answer.set_result(result)

    async def _run_stopped_hook(self, actor: Actor[M]) -> None:
        try:
            await actor.stopped()
        except Exception:
            log.exception("actor %r failed in its stopped hook", self.ref.name)

    def close(self) -> None:
        self._closing.set()
        self._mailbox.close()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Supervisor:
    """Owns a set of actors, in the order in which they depend on each other.

    clock: seconds, for the windows of restart policies.
    Use: `async with Supervisor() as actors: actors.spawn(…); await actors.escalated()`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._children: dict[str, tuple[_Child[Any], asyncio.Task[None]]] = {}
        self._escalation: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(
        self,
        name: str,
        make: Callable[[], Actor[M]],
        *,
        mailbox_capacity: int = DEFAULT_MAILBOX_CAPACITY,
        policy: RestartPolicy | None = None,
    ) -> ActorRef[M]:
        """Start an actor. make is called for every start and restart. The reference takes messages now."""
        if name in self._children:
            raise ValueError(f"an actor named {name!r} runs already")
        child = _Child(name, make, Mailbox(name, mailbox_capacity), policy or RestartPolicy(), self._clock)
        task = asyncio.get_running_loop().create_task(child.run(), name=name)
        self._children[name] = (child, task)
        task.add_done_callback(self._on_child_end)
        return child.ref

    async def escalated(self) -> None:
        """Wait until an actor fails for good; raises its Escalation. Returns when the supervisor stops."""
        await asyncio.shield(self._escalation)

    async def stop(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Stop the actors, the youngest first. Each has grace_s to finish its message, then it is cancelled.
        Questions that wait get ActorStopped. Idempotent."""
        while self._children:
            name, (child, task) = self._children.popitem()
            child.close()
            _, late = await asyncio.wait([task], timeout=grace_s)
            if late:
                log.warning(
                    "actor %r did not finish its message within %.1f s and is cancelled", name, grace_s
                )
                task.cancel()
                await asyncio.wait([task], timeout=grace_s)
        if not self._escalation.done():
            self._escalation.set_result(None)

    async def __aenter__(self) -> "Supervisor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _on_child_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._escalation.done():
            return
        error = task.exception()
        if error is not None:
            self._escalation.set_exception(error)
            # Nobody may be waiting; the error was logged or will be raised by `escalated`.
            self._escalation.exception()
