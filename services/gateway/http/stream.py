"""The events of one stream, in the order that clients rely on.

Per choice: an opening chunk (chat: the role), text chunks, one chunk with finish_reason; then the usage
chunk if it was asked for, and always `[DONE]`. A failure is an error event before `[DONE]`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET, UnsetType

from services.gateway.admission import RequestError
from services.gateway.engine import Final
from services.gateway.http.accounts import metrics_of, usage_of
from services.gateway.http.errors import as_request_error, error_body, generation_failed
from services.gateway.http.fanout import Delta, Fanout
from services.gateway.http.forms import Extras, Form
from services.gateway.http.objects import Usage
from services.gateway.http.sse import DONE, frame


class StreamWriter:
    """Frames of one stream. failure: why no more of it will come, None while all is well."""

    def __init__(self, form: Form) -> None:
        self.failure: RequestError | None = None
        self._form = form
        self._finals: dict[int, Final] = {}
        self._completion_tokens = [0] * form.choices

    @property
    def finished(self) -> bool:
        return self.failure is not None or len(self._finals) == self._form.choices

    def opening(self) -> list[bytes]:
        openings = [self._form.opening(index) for index in range(self._form.choices)]
        return [frame(self._form.chunk([one], self._no_usage)) for one in openings if one is not None]

    def write(self, batch: dict[int, Delta]) -> list[bytes]:
        return [one for index, delta in batch.items() for one in self._write_choice(index, delta)]

    def closing(self) -> list[bytes]:
        frames = []
        if self.failure is not None:
            frames.append(frame(error_body(self.failure)))
        elif self._form.wants.usage:
            metrics = metrics_of(self._finals, self._form.wants.metrics)
            usage = usage_of(self._finals, self._form.group)
            frames.append(frame(self._form.chunk([], usage, metrics=metrics)))
        return [*frames, DONE]

    def _write_choice(self, index: int, delta: Delta) -> list[bytes]:
        form, wants, frames = self._form, self._form.wants, []
        extras = Extras.of(delta, wants)
        self._completion_tokens[index] += len(delta.token_ids)
        if delta.texts or (delta.token_ids and (wants.token_ids or wants.spec)):
            piece = form.piece(index, delta.text, extras)
            frames.append(frame(form.chunk([piece], self._running_usage(index))))
        if delta.final is not None and delta.final.finish_reason == "error":
            self.failure = generation_failed(delta.final.error)
        elif delta.final is not None:
            frames.append(self._finish(index, delta.final, extras))
        return frames

    def _finish(self, index: int, final: Final, extras: Extras) -> bytes:
        self._finals[index] = final
        self._completion_tokens[index] = final.completion_tokens
        ending = self._form.ending(index, final.finish_reason, extras)
        wants = self._form.wants
        metrics = metrics_of({index: final}, wants.metrics and not wants.usage and self._form.choices == 1)
        usage = self._running_usage(index)
        return frame(self._form.chunk([ending], usage, seed=self._form.seed, metrics=metrics))

    @property
    def _no_usage(self) -> UnsetType | None:
        return None if self._form.wants.usage else UNSET

    def _running_usage(self, index: int) -> Usage | UnsetType | None:
        if not self._form.wants.running_usage:
            return self._no_usage
        prompt, completion = self._form.prompt_tokens[index], self._completion_tokens[index]
        return Usage(prompt, completion, prompt + completion)


async def stream_events(fanout: Fanout, writer: StreamWriter, frames: list[bytes]) -> AsyncIterator[bytes]:
    """What one `send` each should carry. frames: those that the first batch gave."""
    try:
        while not writer.finished:
            if frames:
                yield b"".join(frames)
            frames = writer.write(await fanout.next())
    except Exception as error:
        writer.failure = as_request_error(error)
        frames = []
    yield b"".join([*frames, *writer.closing()])
