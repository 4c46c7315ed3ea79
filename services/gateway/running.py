"""One running request as its front sees it: committed tokens in, chunks of text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from services.gateway.engine import Chunk, Final, GenerationSpec
from services.gateway.events import Emit, Failed, Finished
from services.gateway.text import FinishReason, TextStream


class RunningGeneration:
    """Implements `Generation`, and the Coordinator's `Sink` that turns its tokens into text.

    submitted_at: loop time. on_cancel: asks the Coordinator to abort; called at most once.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        text: TextStream,
        submitted_at: float,
        on_cancel: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._text = text
        self._submitted_at = submitted_at
        self._on_cancel = on_cancel
        self._cancelled = False
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._completion_tokens = 0
        self._first_token_at: float | None = None
        self._finish: FinishReason | None = None
        self._final: Final | None = None

    # Sink

    def push(self, token_id: int) -> str | None:
        self._finish = self._text.push(token_id)
        return self._finish.reason if self._finish else None

    # Generation

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk

    @property
    def final(self) -> Final:
        assert self._final is not None, "read `final` after the iteration has ended"
        return self._final

    def cancel(self) -> None:
        if not self._cancelled and self._final is None:
            self._cancelled = True
            self._on_cancel()

    # Outcomes

    def emitted(self, emit: Emit, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
        self._completion_tokens += len(emit.ids)
        self._chunks.put_nowait(
            Chunk(emit.ids, self._text.take(), emit.from_draft, emit.drafted, emit.accepted)
        )

    def ended(self, outcome: Finished | Failed, now: float) -> None:
        self._text.finish()
        failed = isinstance(outcome, Failed)
        self._final = Final(
            finish_reason="error" if isinstance(outcome, Failed) else outcome.reason,
            stop_reason=self._finish.stop_reason if self._finish and not failed else None,
            prompt_tokens=len(self._spec.prompt_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=outcome.cached_tokens,
            queue_s=(outcome.admitted_at or now) - self._submitted_at,
            first_token_s=(self._first_token_at or now) - self._submitted_at,
            total_s=now - self._submitted_at,
            spec=outcome.stats,
            error=outcome.error if isinstance(outcome, Failed) else "",
        )
        self._chunks.put_nowait(None)
