"""The blocking client: the asyncio client on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from paceline import DEFAULT_ADDRESS
from paceline.client import (
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    AsyncClient,
    AsyncStream,
    Completion,
)
from paceline.errors import PacelineError
from paceline.wire import Chunk, Final, ModelInfo

CLOSE_TIMEOUT_S = 5.0

_T = TypeVar("_T")


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-client", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Waits for `work`; an exception here, such as KeyboardInterrupt, cancels it. Raises PacelineError
        after `close` and in a fork."""
        unusable = self._unusable()
        if unusable:
            work.close()
            raise PacelineError(unusable)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, client: AsyncClient) -> None:
        """Closes the client, then the loop. May run in any thread, this one included, and in a fork."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(client), self._loop)
        if threading.current_thread() is not self._thread:
            closing.result(CLOSE_TIMEOUT_S)
            self._thread.join(CLOSE_TIMEOUT_S)
            self._loop.close()

    async def _close(self, client: AsyncClient) -> None:
        try:
            await client.close()
        finally:
            self._loop.call_soon(self._loop.stop)

    def _unusable(self) -> str:
        if os.getpid() != self._pid:
            return (
                f"this client was made in process {self._pid} and cannot be used in its fork {os.getpid()}: "
                "make one per process"
            )
        return "this client is closed: make a new one" if self._closed else ""


class Stream:
    """Chunks of one generation: `for chunk in stream`, then `stream.final`.

    A stream that is dropped, closed or left by `break`, and one whose reader is interrupted, cancels its
    generation. `cancel` asks for an early end and lets the reader go on to it.
    """

    def __init__(self, stream: AsyncStream, thread: _LoopThread, client: Client) -> None:
        self._stream = stream
        self._thread = thread
        self._client = client  # kept: a client that is dropped closes

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = self._thread.call(self._stream.next())
        if chunk is None:
            raise StopIteration
        return chunk

    @property
    def final(self) -> Final:
        """How the generation ended. Raises PacelineError before its end, and the error of a failed one."""
        return self._stream.final

    def result(self) -> Completion:
        """Reads to the end."""
        return self._thread.call(self._stream.result())

    def cancel(self) -> None:
        """Idempotent: the stream then ends with finish_reason abort."""
        self._thread.call(_cancel(self._stream))

    def close(self) -> None:
        """Cancels the generation if it still runs. Idempotent."""
        self._thread.call(self._stream.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Client:
    """A connection to one server, for use from any thread of one process. It connects at first use and
    reconnects. Arguments as of `AsyncClient`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    ) -> None:
        self._client = AsyncClient(address, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        self._thread = _LoopThread()
        self._close = weakref.finalize(self, self._thread.close, self._client)

    @property
    def address(self) -> str:
        return self._client.address

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
    ) -> Stream:
        """As `AsyncClient.generate`."""
        started = self._thread.call(
            _generate(
                self._client,
                prompt=prompt,
                messages=messages,
                token_ids=token_ids,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                seed=seed,
                stop=stop,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
                priority=priority,
                timeout_s=timeout_s,
            )
        )
        return Stream(started, self._thread, self)

    def model(self) -> ModelInfo:
        """What the server serves; connects if need be. Raises RequestTimeout."""
        return self._thread.call(self._client.model())

    def close(self) -> None:
        """Cancels what runs and closes the connection. Idempotent."""
        self._close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _generate(client: AsyncClient, **request: Any) -> AsyncStream:
    return client.generate(**request)


async def _cancel(stream: AsyncStream) -> None:
    stream.cancel()
