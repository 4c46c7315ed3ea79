"""A request body: read up to a limit, decoded into a typed struct, or refused with the field at fault."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from services.gateway.admission import RequestError
from services.gateway.http.errors import unsupported

DISCARDED_BYTES = 32 * 2**20
"""Read past the limit and thrown away: a client that still sends does not see an answer, only a reset."""

_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_AnyStruct = TypeVar("_AnyStruct", bound=msgspec.Struct)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises RequestError: 400 unless the body is declared as JSON, 413 beyond max_bytes."""
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            400, "invalid_content_type", f"Content-Type must be application/json, got {declared[:80]!r}."
        )
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            body += part
        elif size > max_bytes + DISCARDED_BYTES:
            break
    if size > max_bytes:
        raise RequestError(
            413, "request_too_large", f"The request body is larger than {max_bytes} bytes, the limit here."
        )
    return bytes(body)


def decode_body(body: bytes, kind: type[_AnyStruct], unbuilt: dict[str, tuple[Any, ...]]) -> _AnyStruct:
    """The body as a `kind`; null is absent, unknown fields are ignored.

    unbuilt: known fields that are not acted on, with the values that change nothing; any other value is
    refused rather than ignored. Raises RequestError.
    """
    try:
        body.decode()  # the decoder below does not look into strings that it skips
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in fields.keys() & unbuilt.keys():
            value = msgspec.json.decode(fields[name])
            if not _changes_nothing(value, unbuilt[name]):
                raise unsupported(name, f"`{name}` is not supported by this server: leave it out.")
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, "invalid_json", f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError(400, "invalid_json", "The request body is nested too deeply.") from None


def _changes_nothing(value: object, defaults: Iterable[object]) -> bool:
    return value is None or any(
        value == default and isinstance(value, bool) == isinstance(default, bool) for default in defaults
    )


def _invalid(problem: str) -> RequestError:
    path = _AT_PATH.search(problem)
    if path is None or not path[1]:
        return RequestError(400, "invalid_json", f"The request body must be a JSON object: {problem}")
    expected = problem[: path.start()]
    return RequestError(400, "invalid_value", f"`{path[1]}` is invalid: {expected}.", path[1])
