"""Server-sent events over raw ASGI: one `send` per batch of frames."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encoder = msgspec.json.Encoder()


def frame(event: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"


class EventStream:
    """ASGI response that sends each item of `batches` at once, then ends.

    batches: the bytes of whole frames. close: runs exactly once, however the response ends.
    """

    def __init__(self, batches: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._batches = batches
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            async for batch in self._batches:
                await send({"type": "http.response.body", "body": batch, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
