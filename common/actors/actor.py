"""An actor: state that one message at a time may touch, and the reference through which it is reached."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from common.actors.errors import ActorStopped, AskTimeout
from common.actors.mailbox import Envelope, Mailbox, MailboxStats
from common.actors.timers import Timers

M = TypeVar("M")
Message = TypeVar("Message", contravariant=True)


class Ref(Protocol[Message]):
    """What a sender needs of an actor, here or in another process."""

    def tell(self, message: Message) -> None:
        """Hand over a message. Never blocks. Raises Undeliverable: then nothing has happened."""
        ...

    async def ask(self, message: Message, timeout_s: float) -> Any:
        """The value that `receive` returns for the message.

        Always ends: with that value, with AskTimeout after timeout_s seconds, or with Undeliverable when the
        message is not taken or its actor fails or stops.
        """
        ...


class ActorRef(Generic[M]):
    """A local `Ref`; stays the same over restarts of its actor. Event loop only."""

    def __init__(self, name: str, mailbox: Mailbox[M]) -> None:
        self.name = name
        self._mailbox = mailbox

    def tell(self, message: M) -> None:
        self._mailbox.put(Envelope(message))

    async def ask(self, message: M, timeout_s: float) -> Any:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._mailbox.put(Envelope(message, answer))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            # A TimeoutError that the actor raised arrives as ActorStopped, so this is the clock's.
            raise AskTimeout(
                f"actor {self.name!r} did not answer {_kind(message)} within {timeout_s} s"
            ) from None

    def post(self, message: M, is_current: Callable[[], bool] | None = None) -> bool:
        """Deliver what the actor itself asked for (a timer, a device result), past the mailbox's bound.

        is_current: asked right before delivery; the message is dropped if it says no. False if the actor has
        stopped.
        """
        try:
            self._mailbox.put_owed(Envelope(message, None, is_current))
        except ActorStopped:
            return False
        return True

    def stats(self) -> MailboxStats:
        return self._mailbox.stats()

    def __repr__(self) -> str:
        return f"ActorRef({self.name!r})"


def _kind(message: object) -> str:
    return type(message).__name__


@dataclass(frozen=True, slots=True)
class ActorContext(Generic[M]):
    """What the runtime gives to a started actor: a reference to itself, and timers that end with it."""

    ref: ActorRef[M]
    timers: Timers[M]


class Actor(ABC, Generic[M]):
    """Override `receive`, and the hooks that are needed.

    An exception out of `started` or `receive` ends this instance; its supervisor makes a new one. Messages
    that wait in the mailbox stay for it, the one that failed is not repeated.
    """

    async def started(self, context: ActorContext[M]) -> None:
        """Runs before the first message."""

    @abstractmethod
    async def receive(self, message: M) -> object:
        """Handle one message; the next waits. What is returned answers an `ask`."""

    async def stopped(self) -> None:
        """Runs once after `started` was entered, however the actor ends. What it raises is logged."""
