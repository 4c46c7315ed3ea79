"""API keys: everything is closed unless it is listed as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.admission import RequestError
from services.gateway.http.errors import error_response


class ApiKeys:
    """Compares in constant time: digests of equal length, and always with every key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def opens(self, key: bytes) -> bool:
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class RequireKey:
    """ASGI middleware that answers 401 unless the path is open or a key is given, as a bearer token or
    in X-Api-Key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            given = _given_keys(scope)
            if not any(self._keys.opens(key) for key in given):
                problem = "is wrong" if given else "is missing"
                refused = RequestError(
                    401,
                    "invalid_api_key",
                    f"The API key {problem}: send `Authorization: Bearer KEY` or `X-Api-Key: KEY`.",
                )
                await error_response(refused, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given_keys(scope: Scope) -> list[bytes]:
    keys = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(token.strip())
    return keys
