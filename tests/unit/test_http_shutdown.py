"""The server ends in order: refuse, wait, end what is open with an error, close."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest
from fake_engine import FakeEngine
from http_harness import MESSAGES, events, running_site

from services.gateway.http.server import listen


async def test_open_streams_end_with_an_error_event_and_done_and_others_with_503() -> None:
    async with running_site(FakeEngine(tokens_per_step=(2,))) as site:
        site.engine.gate.hold()
        site.engine.gate.allow(1)
        body = {"messages": MESSAGES, "stream": True}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as streaming:
            whole = asyncio.create_task(site.complete())
            silent = asyncio.create_task(site.complete(stream=True))
            lines = streaming.aiter_text()
            text = await anext(lines)
            await site.engine.until(lambda engine: len(engine.running) == 3)
            began_s = time.monotonic()
            await site.server.shutdown(grace_s=0.0)
            assert time.monotonic() - began_s < 5
            text += "".join([piece async for piece in lines])
        streamed = events(text)
        assert streamed[-1] == "[DONE]"
        assert streamed[-2]["error"]["code"] == "shutting_down"
        assert streamed[-2]["error"]["type"] == "server_error"
        for response in (await whole, await silent):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
        await site.engine.idle()
        with pytest.raises(httpx.ConnectError):
            await site.client.get("/health")


async def test_a_draining_server_finishes_what_is_open_and_refuses_what_is_new() -> None:
    async with running_site() as site:
        site.engine.gate.hold()
        open_one = asyncio.create_task(site.complete(max_tokens=4))
        await site.engine.until(lambda engine: len(engine.running) == 1)
        ending = asyncio.create_task(site.server.shutdown(grace_s=10))
        await asyncio.sleep(0)
        refused = await site.complete()
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "shutting_down"
        ready = await site.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "shutting_down")
        assert (await site.client.get("/health")).status_code == 200
        site.engine.gate.open()
        assert (await open_one).status_code == 200
        await asyncio.wait_for(ending, 3)


async def test_shutdown_twice_is_shutdown_once() -> None:
    async with running_site() as site:
        await asyncio.gather(site.server.shutdown(0), site.server.shutdown(0))
        await site.server.shutdown(0)


def listen_with_a_small_buffer(host: str, port: int) -> socket.socket:
    listener = listen(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


async def test_a_reader_that_stalls_does_not_hold_up_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.server.listen", listen_with_a_small_buffer)
    engine = FakeEngine(
        max_model_len=60_010, tokens_per_step=(20_000,), script=lambda prompt: "\x01" * 60_000
    )
    body = b'{"prompt": "hi", "stream": true, "return_token_ids": true, "paceline_spec": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with running_site(engine) as site:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", site.server.port))
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await engine.until(lambda engine: bool(engine.specs) and not engine.running, 5)
            assert not await site.app.lifecycle.idle(0.2)
            began_s = time.monotonic()
            await site.server.shutdown(grace_s=0.0)
            assert time.monotonic() - began_s < 5
