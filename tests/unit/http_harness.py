"""The HTTP front with a fake engine on a real loopback socket."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from fake_engine import FakeEngine
from tiny_tokenizer import TinyTokenizer

from common.messages.lifecycle import Heartbeat
from services.gateway.http.app import HttpApp, create_app
from services.gateway.http.metrics import EngineGauges, GatewayMetrics, MeteredEngine
from services.gateway.http.server import HttpServer, serve_http
from services.gateway.http.settings import HttpSettings
from services.gateway.options import KBelief
from services.gateway.usage import Usage


@dataclass(frozen=True)
class Site:
    engine: FakeEngine
    app: HttpApp
    server: HttpServer
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "hi", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})


def busy_usage() -> Usage:
    """Over 10 s the target worked 6 s and the draft 2.5 s; a round was outstanding for 8 s."""
    usage = Usage()
    usage.sample(0.0)
    usage.rounds_are(True, 1.0)
    usage.target_worked(6.0)
    usage.draft_beats(Heartbeat(1, 5, 3, False, 2_500_000))
    usage.rounds_are(False, 9.0)
    usage.sample(10.0)
    usage.hidden_rounds.update(rows=5, no_rows=2, none=9)
    return usage


MESSAGES = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def running_site(engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Site]:
    engine = engine or FakeEngine()
    metrics = GatewayMetrics(
        lambda: EngineGauges(
            len(engine.running),
            len(engine.waiting),
            pages=8,
            free_pages=6,
            retiring_pages=1,
            k=KBelief(2, (0.5, 0.25), (0.01, 0.012, 0.014), (100.0, 125.0, 125.0)),
            groups=2,
            usage=busy_usage(),
            resident_bytes={"target": 5000, "gateway": 300},
        )
    )
    app = create_app(
        MeteredEngine(engine, metrics), TinyTokenizer(), HttpSettings(version="1.2.3", **settings), metrics
    )
    server = await serve_http(app, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            yield Site(engine, app, server, client)
    finally:
        await server.shutdown(0)


def events(body: str) -> list[Any]:
    """The data of every event, JSON parsed; the end marker as a string."""
    frames = body.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [text if (text := frame[6:]) == "[DONE]" else json.loads(text) for frame in frames]
