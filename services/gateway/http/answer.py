"""From admitted choices to a response: one JSON body, or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admission import refusal
from services.gateway.engine import AdmissionError, GenerationSpec
from services.gateway.http.accounts import metrics_of, usage_of
from services.gateway.http.errors import as_request_error, generation_failed
from services.gateway.http.fanout import DISCONNECTED, Delta, Fanout
from services.gateway.http.forms import Extras, Form
from services.gateway.http.front import Front
from services.gateway.http.sse import EventStream
from services.gateway.http.stream import StreamWriter, stream_events


async def stream_answer(
    front: Front, request: Request, specs: Sequence[GenerationSpec], form: Form
) -> EventStream:
    """Raises RequestError for whatever fails before the first token; later failures are events."""
    exchange = Exchange(front, request, specs)
    try:
        first = await exchange.fanout.next()
        writer = StreamWriter(form)
        frames = [*writer.opening(), *writer.write(first)]
        if writer.failure is not None:
            raise writer.failure
    except BaseException as error:
        exchange.close()
        if isinstance(error, Exception):
            raise as_request_error(error) from None
        raise
    return EventStream(stream_events(exchange.fanout, writer, frames), exchange.close)


async def whole_answer(
    front: Front, request: Request, specs: Sequence[GenerationSpec], form: Form
) -> Response:
    """Raises RequestError if any choice fails."""
    exchange = Exchange(front, request, specs)
    try:
        choices = await _gather(exchange.fanout, form.choices)
    except Exception as error:
        raise as_request_error(error) from None
    finally:
        exchange.close()
    finals = {i: choice.final for i, choice in enumerate(choices) if choice.final is not None}
    written = [
        form.whole(i, choices[i].text, final.finish_reason, Extras.of(choices[i], form.wants))
        for i, final in finals.items()
    ]
    body = form.answer(written, usage_of(finals, form.group), metrics_of(finals, form.wants.metrics))
    return Response(msgspec.json.encode(body), media_type="application/json")


class Exchange:
    """Choices that run for a client who may go away: then they are cancelled, streaming or not.

    Raises RequestError if the engine does not take them. `close` must follow.
    """

    def __init__(self, front: Front, request: Request, specs: Sequence[GenerationSpec]) -> None:
        try:
            self.fanout = Fanout.submit(front.engine, specs)
        except AdmissionError as error:
            raise refusal(error) from None
        self._lifecycle = front.lifecycle
        self._lifecycle.opened(self.fanout)
        self._watch = asyncio.create_task(_interrupt_on_disconnect(request, self.fanout))

    def close(self) -> None:
        self._watch.cancel()
        self._lifecycle.closed(self.fanout)


async def _interrupt_on_disconnect(request: Request, fanout: Fanout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    fanout.interrupt(DISCONNECTED)


async def _gather(fanout: Fanout, choices: int) -> list[Delta]:
    gathered = [Delta() for _ in range(choices)]
    while batch := await fanout.next():
        for index, delta in batch.items():
            gathered[index].extend(delta)
            if delta.final is not None and delta.final.finish_reason == "error":
                raise generation_failed(delta.final.error)
    return gathered
