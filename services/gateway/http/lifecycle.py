"""Which requests are open, and how they end when the server does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.errors import error_response, shutting_down
from services.gateway.http.fanout import SHUTTING_DOWN, Fanout


class Lifecycle:
    """begin_drain: new requests are refused. interrupt: open ones end now, with an error."""

    def __init__(self) -> None:
        self.draining = False
        self._interrupted = False
        self._fanouts: set[Fanout] = set()
        self._responses = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def opened(self, fanout: Fanout) -> None:
        self._fanouts.add(fanout)
        if self._interrupted:
            fanout.interrupt(SHUTTING_DOWN)

    def closed(self, fanout: Fanout) -> None:
        fanout.close()
        self._fanouts.discard(fanout)

    def begin_drain(self) -> None:
        self.draining = True

    def interrupt(self) -> None:
        self._interrupted = True
        for fanout in list(self._fanouts):
            fanout.interrupt(SHUTTING_DOWN)

    @contextlib.contextmanager
    def response(self) -> Iterator[None]:
        """Counts a response that is being made as open."""
        self._responses += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._responses -= 1
            if self._responses == 0:
                self._idle.set()

    async def idle(self, timeout_s: float) -> bool:
        """True once no response is open, False if one still is after timeout_s."""
        if self._responses == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class RefuseWhileDraining:
    """ASGI middleware: a server on its way out answers 503, except for what tells its state."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, open_paths: frozenset[str]) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._lifecycle.response():
            if self._lifecycle.draining and scope["path"] not in self._open_paths:
                refused = error_response(shutting_down(), {"Connection": "close"})
                await refused(scope, receive, send)
            else:
                await self._app(scope, receive, send)
