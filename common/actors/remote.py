"""References to actors in other processes, and the questions that wait for their answers."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from common.actors.errors import ActorStopped, AskTimeout, PeerLost, Undeliverable

M = TypeVar("M")

MAX_OPEN_QUESTIONS = 1024


class Questions:
    """Questions sent and not yet answered, by peer and number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[tuple[str, int], asyncio.Future[Any]] = {}

    def open(self, peer: str) -> tuple[int, asyncio.Future[Any]]:
        """Raises Undeliverable when too many are open."""
        if len(self._open) >= MAX_OPEN_QUESTIONS:
            raise Undeliverable(f"{MAX_OPEN_QUESTIONS} questions to other processes are open")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[peer, number] = future
        return number, future

    def close(self, peer: str, number: int) -> None:
        self._open.pop((peer, number), None)

    def answer(self, peer: str, number: int, value: object) -> bool:
        """False if nobody waits for it (any more)."""
        return self._resolve(peer, number, lambda future: future.set_result(value))

    def fail(self, peer: str, number: int, reason: str) -> bool:
        return self._resolve(
            peer, number, lambda future: future.set_exception(ActorStopped(f"{peer}: {reason}"))
        )

    def lose(self, peer: str) -> None:
        """Answer everything that was asked of the peer with PeerLost."""
        for asked, number in [key for key in self._open if key[0] == peer]:
            self._resolve(asked, number, lambda future: future.set_exception(PeerLost(f"{peer} is gone")))

    def lose_all(self) -> None:
        for peer in {asked for asked, _ in self._open}:
            self.lose(peer)

    def _resolve(self, peer: str, number: int, settle: Callable[[asyncio.Future[Any]], None]) -> bool:
        future = self._open.pop((peer, number), None)
        if future is None or future.done():
            return False
        settle(future)
        return True


class RemoteRef(Generic[M]):
    """A `Ref` to whatever handles an endpoint's messages at the other end of a socket."""

    def __init__(
        self,
        peer: str,
        questions: Questions,
        send: Callable[[M], bool],
        send_question: Callable[[int, M], bool],
    ) -> None:
        self.peer = peer
        self._questions = questions
        self._send = send
        self._send_question = send_question

    def tell(self, message: M) -> None:
        if not self._send(message):
            raise PeerLost(
                f"{self.peer} does not take {type(message).__name__}: it is gone or no longer reads"
            )

    async def ask(self, message: M, timeout_s: float) -> Any:
        number, answer = self._questions.open(self.peer)
        try:
            if not self._send_question(number, message):
                raise PeerLost(f"{self.peer} does not take {type(message).__name__}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise AskTimeout(
                f"{self.peer} did not answer {type(message).__name__} within {timeout_s} s"
            ) from None
        finally:
            self._questions.close(self.peer, number)

    def __repr__(self) -> str:
        return f"RemoteRef({self.peer!r})"
