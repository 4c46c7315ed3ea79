"""The OpenAI-compatible HTTP front as one ASGI application."""

from __future__ import annotations

import functools

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.admission import RequestError
from services.gateway.engine import Engine
from services.gateway.http import generate, info
from services.gateway.http.auth import ApiKeys, RequireKey
from services.gateway.http.errors import CLIENT_CLOSED, error_response
from services.gateway.http.front import Front, HttpTokenizer
from services.gateway.http.lifecycle import Lifecycle, RefuseWhileDraining
from services.gateway.http.metrics import GatewayMetrics
from services.gateway.http.request_id import RequestId
from services.gateway.http.settings import HttpSettings

_POST = {
    "/v1/chat/completions": generate.create_chat_completion,
    "/v1/completions": generate.create_completion,
    "/tokenize": info.tokenize,
    "/detokenize": info.detokenize,
}
_GET = {
    "/v1/models": info.list_models,
    "/v1/models/{model:path}": info.retrieve_model,
    "/version": info.version,
    "/health": info.health,
    "/ready": info.ready,
    "/metrics": info.metrics,
}
STATE_PATHS = frozenset({"/health", "/ready"})
"""Open without a key and answered while the server drains."""


class HttpApp:
    """ASGI application; `lifecycle` ends it."""

    def __init__(self, front: Front) -> None:
        self.lifecycle = front.lifecycle
        self._app = RequestId(CountResponses(_build(front), front.metrics))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(
    engine: Engine, tokenizer: HttpTokenizer, settings: HttpSettings, metrics: GatewayMetrics | None = None
) -> HttpApp:
    """metrics: what /metrics shows; its generation series move when `engine` is a MeteredEngine of it."""
    return HttpApp(Front(engine, tokenizer, settings, metrics or GatewayMetrics(), Lifecycle()))


def _build(front: Front) -> Starlette:
    routes = [
        Route(path, functools.partial(endpoint, front), methods=[method])
        for method, endpoints in (("POST", _POST), ("GET", _GET))
        for path, endpoint in endpoints.items()
    ]
    middleware = [
        Middleware(RefuseWhileDraining, lifecycle=front.lifecycle, open_paths=STATE_PATHS | {"/metrics"}),
    ]
    if front.settings.api_keys:
        open_paths = STATE_PATHS | {"/metrics"} if front.settings.open_metrics else STATE_PATHS
        middleware.append(
            Middleware(RequireKey, keys=ApiKeys(front.settings.api_keys), open_paths=open_paths)
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


class CountResponses:
    """ASGI middleware: responses by route and status; what matched no route counts as `other`."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] in _POST or scope["path"] in _GET
                self._metrics.observe_response(scope["path"] if known else "other", message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path} is not served here: {error.detail}."
    return error_response(RequestError(error.status_code, code, message), error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _on_bug(request: Request, error: Exception) -> Response:
    return error_response(RequestError(500, "internal_error", "The server failed on this request."))
