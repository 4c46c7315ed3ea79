"""One request's way to its client: chunks within its credit, merged when it lags, one terminal message."""

from __future__ import annotations

from collections.abc import Callable

from paceline import wire
from services.gateway.admission import RequestError
from services.gateway.engine import Chunk, Final, Generation
from services.gateway.zmq.attribution import Attribution, TokenTexts, spans


class Stream:
    """Nothing here waits. What is held for a client that lags is at most one context of tokens.

    send: takes a message for the client. credit: chunks that may be sent.
    """

    def __init__(
        self, request_id: int, credit: int, tokenizer: TokenTexts, send: Callable[[wire.Message], None]
    ) -> None:
        self.cancelled = False
        self._id = request_id
        self._credit = min(max(credit, 1), wire.MAX_CREDIT)
        self._attribution = Attribution(tokenizer)
        self._send = send
        self._generation: Generation | None = None
        self._seq = 0
        self._ended = False
        self._held = _Held()

    def run(self, generation: Generation) -> None:
        """The generation that this stream carries."""
        self._generation = generation

    def cancel(self) -> None:
        """Idempotent; the stream ends when its generation does."""
        self.cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    def offer(self, chunk: Chunk) -> None:
        self._held.add(chunk, self._attribution.flags(chunk))
        self._flush_within_credit()

    def grant(self, chunks: int) -> None:
        self._credit = min(self._credit + max(chunks, 0), wire.MAX_CREDIT)
        self._flush_within_credit()

    def finish(self, final: Final, seed: int) -> None:
        """What is held, then the Final. Neither needs credit."""
        self._flush()
        spec = final.spec
        self._end(
            wire.Final(
                id=self._id,
                seq=self._seq,
                finish_reason=final.finish_reason,
                stop_reason=final.stop_reason,
                usage=wire.Usage(final.prompt_tokens, final.completion_tokens, final.cached_tokens),
                seed=seed,
                spec=wire.SpecStats(spec.steps, spec.drafted, spec.accepted, list(spec.histogram)),
                timings=wire.Timings(final.queue_s, final.first_token_s, final.total_s),
            )
        )

    def abort(self, seed: int) -> None:
        """The end of a request that was cancelled before it ran."""
        self.finish(Final("abort", None, 0, 0, 0, 0.0, 0.0, 0.0), seed)

    def fail(self, error: RequestError) -> None:
        """What is held, then the Error. Does nothing after the end."""
        self._flush()
        self._end(wire.Error(self._id, error.status, error.code, error.message, error.param))

    def _end(self, terminal: wire.Final | wire.Error) -> None:
        if not self._ended:
            self._ended = True
            self._send(terminal)

    def _flush_within_credit(self) -> None:
        if self._credit > 0 and self._held.steps:
            self._credit -= 1
            self._flush()

    def _flush(self) -> None:
        if self._held.steps and not self._ended:
            held, self._held = self._held, _Held()
            seq, self._seq = self._seq, self._seq + 1
            self._send(held.chunk(self._id, seq))


class _Held:
    """Chunks merged into one."""

    def __init__(self) -> None:
        self.steps = 0
        self._token_ids: list[int] = []
        self._from_draft: list[bool] = []
        self._texts: list[str] = []
        self._flags: list[bool] = []
        self._drafted = self._accepted = 0

    def add(self, chunk: Chunk, flags: list[bool]) -> None:
        self.steps += 1
        self._token_ids += chunk.token_ids
        self._from_draft += chunk.from_draft
        self._texts.append(chunk.text)
        self._flags += flags
        self._drafted += chunk.drafted
        self._accepted += chunk.accepted

    def chunk(self, request_id: int, seq: int) -> wire.Chunk:
        return wire.Chunk(
            id=request_id,
            seq=seq,
            token_ids=self._token_ids,
            text="".join(self._texts),
            from_draft=self._from_draft,
            spans=spans(self._flags),
            drafted=self._drafted,
            accepted=self._accepted,
            steps=self.steps,
        )
