"""Named timers of one actor, delivered as messages."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

M = TypeVar("M")
Message = TypeVar("Message", contravariant=True)


class Post(Protocol[Message]):
    """Delivery that the mailbox's bound does not refuse: `ActorRef.post`."""

    def __call__(self, message: Message, is_current: Callable[[], bool] | None = None) -> bool: ...


class Timers(Generic[M]):
    """At most one timer per name. Setting or cancelling a name also takes back a firing that still waits in
    the mailbox, so a message of a replaced timer is never seen."""

    def __init__(self, post: Post[M]) -> None:
        self._post = post
        self._pending: dict[str, tuple[object, asyncio.TimerHandle]] = {}

    def set(self, name: str, delay_s: float, message: M) -> None:
        """Deliver message in delay_s seconds (0 or less: at once, behind what waits already)."""
        self.cancel(name)
        setting = object()
        handle = asyncio.get_running_loop().call_later(max(delay_s, 0.0), self._fire, name, setting, message)
        self._pending[name] = (setting, handle)

    def cancel(self, name: str) -> None:
        """Idempotent."""
        pending = self._pending.pop(name, None)
        if pending is not None:
            pending[1].cancel()

    def cancel_all(self) -> None:
        for name in list(self._pending):
            self.cancel(name)

    def _fire(self, name: str, setting: object, message: M) -> None:
        self._post(message, lambda: self._take(name, setting))

    def _take(self, name: str, setting: object) -> bool:
        pending = self._pending.get(name)
        if pending is None or pending[0] is not setting:
            return False
        del self._pending[name]
        return True
