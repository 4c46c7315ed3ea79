"""The asyncio client: `AsyncClient.generate` gives an `AsyncStream` of chunks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import DEFAULT_ADDRESS, __version__, wire
from paceline.connection import Connection
from paceline.errors import InvalidRequest, PacelineError
from paceline.request import Request
from paceline.wire import Chunk, Final, Generate, ModelInfo, Params

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation: its text, its token ids and how it ended."""

    text: str
    token_ids: tuple[int, ...]
    final: Final


class AsyncStream:
    """Chunks of one generation: `async for chunk in stream`, then `stream.final`.

    A stream that is dropped, closed or left by `break`, and one whose reader is cancelled, cancels its
    generation. `cancel` asks for an early end and lets the reader go on to it.
    """

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._drop = weakref.finalize(
            self, _abandon, connection, request, asyncio.get_running_loop(), os.getpid()
        )
        self._drop.atexit = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def next(self) -> Chunk | None:
        """The next chunk, None after the last. Raises what ended the generation if it failed."""
        try:
            chunk = await self._request.next()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except PacelineError as error:
            # A fresh traceback for each reader: the stored error is raised again when it is read again.
            raise error.with_traceback(None) from None
        self._connection.return_credit(self._request)
        return chunk

    @property
    def final(self) -> Final:
        """How the generation ended. Raises PacelineError before its end, and the error of a failed one."""
        if self._request.error is not None:
            raise self._request.error
        if self._request.final is None:
            raise PacelineError("the generation has not ended yet: iterate over the stream first")
        return self._request.final

    async def result(self) -> Completion:
        """Reads to the end."""
        chunks = [chunk async for chunk in self]
        text = "".join(chunk.text for chunk in chunks)
        return Completion(text, tuple(i for chunk in chunks for i in chunk.token_ids), self.final)

    def cancel(self) -> None:
        """Idempotent: the stream then ends with finish_reason abort."""
        self._connection.cancel(self._request)

    async def aclose(self) -> None:
        """Cancels the generation if it still runs. Idempotent."""
        if self._drop.detach() is not None:
            self._connection.abandon(self._request)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class AsyncClient:
    """A connection to one server, for use on one event loop. It connects at first use and reconnects.

    address: the server's ZeroMQ address, tcp:// or ipc://. timeout_s: longest time of a generation, unless
    the call gives another. connect_timeout_s: longest wait for the server to answer.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        _check_address(address)
        self.address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = min(connect_timeout_s, timeout_s)
        self._connection = Connection(address, f"paceline-python/{__version__}")
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Starts a generation from exactly one of prompt, messages and token_ids.

        What is None is left to the server (see `paceline.wire.Params`). Raises InvalidRequest here for what
        can be seen here; every other error is raised while the stream is read.
        """
        params = Params(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=None if stop is None else [stop] if isinstance(stop, str) else list(stop),
            stop_token_ids=None if stop_token_ids is None else list(stop_token_ids),
            ignore_eos=ignore_eos,
            priority=priority,
        )
        generate = _checked(
            Generate(
                id=0,
                prompt=prompt,
                messages=None if messages is None else [dict(message) for message in messages],
                token_ids=None if token_ids is None else list(token_ids),
                params=params,
            )
        )
        self._check_usable()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return AsyncStream(
            self._connection, self._connection.submit(generate, self._connect_timeout_s, limit_s)
        )

    async def model(self) -> ModelInfo:
        """What the server serves; connects if need be. Raises RequestTimeout."""
        self._check_usable()
        return (await self._connection.greeted(self._connect_timeout_s)).model

    async def close(self) -> None:
        """Cancels what runs and closes the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise PacelineError("this client is closed: make a new one")
        if os.getpid() != self._pid:
            raise PacelineError(
                f"this client was made in process {self._pid} and cannot be used in its fork {os.getpid()}: "
                "make one per process"
            )
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise PacelineError("this client belongs to another event loop: make one per loop")


def _checked(generate: Generate) -> Generate:
    """Raises InvalidRequest for what the wire cannot carry, before anything is sent."""
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(generate, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, messages and token_ids, got {' and '.join(given) or 'none'}",
            "invalid_value",
            given[0] if given else "prompt",
        )
    try:
        wire.decode_from_client(wire.encode(generate))
    except wire.WireError as error:
        raise InvalidRequest(f"a parameter has a wrong type: {error}", "invalid_value") from None
    return generate


def _check_address(address: str) -> None:
    scheme, _, rest = address.partition("://")
    _, _, port = rest.rpartition(":")
    if not (scheme == "ipc" and rest) and not (scheme == "tcp" and port.isdecimal()):
        raise PacelineError(f"{address!r} is not an address: give tcp://HOST:PORT or ipc://PATH")


def _abandon(connection: Connection, request: Request, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Runs where the stream is collected: in any thread, or in a fork that has no part in it."""
    if os.getpid() == pid:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            loop.call_soon_threadsafe(connection.abandon, request)
