"""The HTTP front on a socket: uvicorn without its signal handlers, ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http.app import HttpApp

BACKLOG = 2048
KEEP_ALIVE_S = 30
MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers that are not complete by then are refused."""
LAST_EVENTS_S = 1.0
"""After an interruption, for writing error events and closing connections; a stalled reader is cut off."""


class BindError(OSError):
    """The address cannot be had; the text says why and what to do in one line."""


class HttpServer:
    """A running server, made by `serve_http`."""

    def __init__(self, app: HttpApp, server: _Server, listener: socket.socket) -> None:
        self._app = app
        self._server = server
        self.host, self.port = listener.getsockname()[:2]
        self._task = asyncio.create_task(server.serve([listener]), name="http server")

    @property
    def started(self) -> bool:
        return self._server.started

    async def shutdown(self, grace_s: float) -> None:
        """Refuses new requests at once and gives open ones grace_s to end. What is open then ends with an
        error event and [DONE], or 503 if it does not stream, and the socket closes. Idempotent; takes at most
        grace_s + 3 s.
        """
        lifecycle = self._app.lifecycle
        lifecycle.begin_drain()
        if not await lifecycle.idle(grace_s):
            lifecycle.interrupt()
            await lifecycle.idle(LAST_EVENTS_S)
        self._server.should_exit = True
        await self._task


async def serve_http(app: HttpApp, host: str, port: int) -> HttpServer:
    """Serves on the running loop; returns once connections are accepted. port: 0 takes a free one.

    Raises BindError.
    """
    uvicorn_server = _Server(
        uvicorn.Config(
            app,
            http=BoundedHeadProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )
    server = HttpServer(app, uvicorn_server, listen(host, port))
    await uvicorn_server.listening.wait()
    return server


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises BindError."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
        raise BindError(
            f"cannot listen on {host}:{port}: {reason or error}; {remedy or 'check --host and --port'}"
        ) from None
    # Accepted sockets inherit it; asyncio does not set it on a socket that it did not make, and then the
    # second write of a response waits for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


_REMEDIES = {
    errno.EADDRINUSE: "stop the program that has it or give another --port",
    errno.EACCES: "give a --port from 1024 up",
    errno.EADDRNOTAVAIL: "give a --host that this machine has, such as 127.0.0.1",
}


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself keeps whatever a client sends as headers."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"connection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the process; `listening` is set once connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
