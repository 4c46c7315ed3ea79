"""A bounded queue between one actor and everyone who speaks to it. Event loop only, no threads."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.actors.errors import ActorStopped, MailboxFull

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Envelope(Generic[M]):
    """answer: where the asker waits. is_current: asked at the moment of delivery; False drops the message."""

    message: M
    answer: asyncio.Future[object] | None = None
    is_current: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class MailboxStats:
    """waiting: messages now. capacity: most that may wait. refused: since the start."""

    waiting: int
    capacity: int
    refused: int


class Mailbox(Generic[M]):
    """First in, first out. Closing it answers every waiting question with ActorStopped."""

    def __init__(self, owner: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"mailbox of {owner!r}: capacity {capacity} is below 1")
        self._owner = owner
        self._capacity = capacity
        self._waiting: deque[Envelope[M]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._refused = 0
        self.closed = False

    def put(self, envelope: Envelope[M]) -> None:
        """Raises MailboxFull or ActorStopped."""
        if len(self._waiting) >= self._capacity and not self.closed:
            self._refused += 1
            raise MailboxFull(f"mailbox of {self._owner!r} is full ({self._capacity} messages)")
        self.put_owed(envelope)

    def put_owed(self, envelope: Envelope[M]) -> None:
        """Put what the actor itself asked for, past the capacity: it bounds how much of that can come.

        Raises ActorStopped.
        """
        if self.closed:
            raise ActorStopped(f"actor {self._owner!r} has stopped")
        self._waiting.append(envelope)
        self._wake()

    async def next(self) -> Envelope[M] | None:
        """The next message that still has a reason; None once closed. One reader."""
        while not self.closed:
            while self._waiting:
                envelope = self._waiting.popleft()
                if _is_wanted(envelope):
                    return envelope
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return None

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        while self._waiting:
            answer = self._waiting.popleft().answer
            if answer is not None and not answer.done():
                answer.set_exception(ActorStopped(f"actor {self._owner!r} stopped before it answered"))
        self._wake()

    def stats(self) -> MailboxStats:
        return MailboxStats(len(self._waiting), self._capacity, self._refused)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _is_wanted(envelope: Envelope[M]) -> bool:
    if envelope.answer is not None and envelope.answer.done():  # the asker has given up
        return False
    return envelope.is_current is None or envelope.is_current()
