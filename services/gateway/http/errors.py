"""OpenAI's nested error body, its status codes, and what a failed stream says."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from services.gateway.admission import RequestError
from services.gateway.http.fanout import DISCONNECTED, SHUTTING_DOWN, Interrupted

CLIENT_CLOSED = 499
"""Status of a request whose client is gone: nobody reads it, metrics do."""
RETRY_AFTER_S = 1

_log = logging.getLogger(__name__)

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: RequestError) -> ErrorBody:
    kind = "server_error" if error.status >= 500 else _KINDS.get(error.status, "invalid_request_error")
    return ErrorBody(ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code))


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Turned-away clients are told when they may come back."""
    retry = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    return Response(
        msgspec.json.encode(error_body(error)),
        error.status,
        {**retry, **(headers or {})},
        media_type="application/json",
    )


def unsupported(param: str, message: str) -> RequestError:
    """A 400 for a field that OpenAI knows and this server does not act on."""
    return RequestError(400, "unsupported_value", message, param)


def shutting_down() -> RequestError:
    return RequestError(503, "shutting_down", "The server is shutting down: try again on another one.")


def generation_failed(reason: str) -> RequestError:
    return RequestError(500, "generation_failed", f"The generation failed: {reason or 'no reason given'}")


def as_request_error(error: Exception) -> RequestError:
    """What a client is told of anything that ended its request."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Interrupted):
        match str(error):
            case reason if reason == SHUTTING_DOWN:
                return shutting_down()
            case reason if reason == DISCONNECTED:
                return RequestError(CLIENT_CLOSED, "client_closed", "The client closed the connection.")
            case reason:
                return generation_failed(reason)
    _log.error("a generation failed", exc_info=error)
    return generation_failed("internal error")
