"""One generation as the client sees it: chunks that came and wait to be read, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque

from paceline.errors import ConnectionLost, PacelineError
from paceline.wire import Chunk, Final, Generate


class Request:
    """State of one generation, touched by the connection's event loop only."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.sent = False
        self.final: Final | None = None
        self.error: PacelineError | None = None
        self.unreturned_credit = 0
        self.timers: list[asyncio.TimerHandle] = []
        self._chunks: deque[Chunk] = deque()
        self._next_seq = 0
        self._arrived = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self.final is not None or self.error is not None

    def push(self, chunk: Chunk) -> None:
        """Raises ConnectionLost if a chunk before this one is missing."""
        self._expect(chunk.seq)
        self._chunks.append(chunk)
        self._arrived.set()

    def finish(self, final: Final) -> None:
        """Raises ConnectionLost if a chunk before the end is missing."""
        self._expect(final.seq)
        self.final = final
        self._end()

    def fail(self, error: PacelineError) -> None:
        """Chunks that came before are still read; then the error is raised."""
        if not self.ended:
            self.error = error
            self._end()

    async def next(self) -> Chunk | None:
        """The next chunk, or None after the last. Raises the error that the request ended with."""
        while not self._chunks:
            if self.error is not None:
                raise self.error
            if self.final is not None:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        self.unreturned_credit += 1
        return self._chunks.popleft()

    def _expect(self, seq: int) -> None:
        if seq != self._next_seq:
            raise ConnectionLost(
                f"messages {self._next_seq} to {seq - 1} of the stream were lost on the way: send it again"
            )
        self._next_seq += 1

    def _end(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self._arrived.set()
