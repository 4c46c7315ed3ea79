"""The choices of one HTTP request, gathered: what each has committed since it was last looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.engine import AdmissionError, Chunk, Engine, Final, Generation, GenerationSpec

DISCONNECTED = "the client closed the connection"
SHUTTING_DOWN = "the server is shutting down"

_pumps: set[asyncio.Task[None]] = set()
"""The event loop itself keeps no reference to a task."""


class Interrupted(Exception):
    """The request ended before its generations did; the text is the reason."""


@dataclass(slots=True)
class Delta:
    """Steps of one choice, merged in order. Holds at most the rest of a generation, so a reader that does
    not read costs memory bounded by the context and never holds up the engine."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    final: Final | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def extend(self, later: Delta) -> None:
        self.texts += later.texts
        self.token_ids += later.token_ids
        self.from_draft += later.from_draft
        self.drafted += later.drafted
        self.accepted += later.accepted
        self.final = later.final

    def add(self, chunk: Chunk) -> None:
        if chunk.text:
            self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.from_draft.extend(chunk.from_draft)
        self.drafted += chunk.drafted
        self.accepted += chunk.accepted


class Fanout:
    """Runs the generations of one request; `close` must follow, and cancels what still runs. Cancelled
    generations are still read to their end, so that whoever counts them sees how they ended."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._pending: dict[int, Delta] = {}
        self._unfinished = len(generations)
        self._changed = asyncio.Event()
        self._interruption: str | None = None
        self._failure: Exception | None = None
        for index, generation in enumerate(generations):
            pump = asyncio.create_task(self._pump(index, generation))
            _pumps.add(pump)
            pump.add_done_callback(_pumps.discard)

    @classmethod
    def submit(cls, engine: Engine, specs: Sequence[GenerationSpec]) -> Fanout:
        """All of them or none. Raises AdmissionError."""
        generations: list[Generation] = []
        try:
            for spec in specs:
                generations.append(engine.submit(spec))
        except AdmissionError:
            for generation in generations:
                generation.cancel()
            raise
        return cls(generations)

    async def next(self) -> dict[int, Delta]:
        """What is new, by choice; empty once every choice has given its Final.

        Raises Interrupted after an interruption or an abort, and whatever a generation raised, each once
        everything committed before has been handed out.
        """
        while not self._pending and self._unfinished and not self._stopped():
            self._changed.clear()
            await self._changed.wait()
        taken, self._pending = self._pending, {}
        if not taken and self._unfinished:
            if self._failure is not None:
                raise self._failure
            raise Interrupted(self._interruption)
        return dict(sorted(taken.items()))

    def interrupt(self, reason: str) -> None:
        """Idempotent. Ends the request without waiting for the engine to end it."""
        if self._interruption is None:
            self._interruption = reason
        self.close()
        self._changed.set()

    def close(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def _stopped(self) -> bool:
        return self._interruption is not None or self._failure is not None

    async def _pump(self, index: int, generation: Generation) -> None:
        try:
            async for chunk in generation:
                if chunk.token_ids or chunk.text:
                    self._pending.setdefault(index, Delta()).add(chunk)
                    self._changed.set()
            final = generation.final
        except Exception as error:
            self._failure = error
        else:
            if final.finish_reason == "abort":
                self._interruption = self._interruption or "the engine gave the request up"
            else:
                self._pending.setdefault(index, Delta()).final = final
                self._unfinished -= 1
        self._changed.set()
