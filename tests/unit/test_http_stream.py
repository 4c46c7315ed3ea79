"""Order and form of events, and who a stream waits for."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from fake_engine import FakeEngine
from http_harness import events, running_site
from tiny_tokenizer import TinyTokenizer

from services.gateway.http.app import create_app
from services.gateway.http.settings import HttpSettings

GOLDEN_CHAT = """\
data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,\
"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,\
"delta":{"content":"G"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,\
"delta":{"content":"rüß"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,\
"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null,"seed":3}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[],"usage":\
{"prompt_tokens":20,"completion_tokens":7,"total_tokens":27,"prompt_tokens_details":{"cached_tokens":0}}}

data: [DONE]

"""

GOLDEN_TEXT = """\
data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"G",\
"logprobs":null,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"rüß",\
"logprobs":null,"finish_reason":null}]}

data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"",\
"logprobs":null,"finish_reason":"length","stop_reason":null}],"seed":3}

data: [DONE]

"""


def golden(body: str) -> str:
    return re.sub(r'"created":\d+', '"created":0', re.sub(r'"id":"[a-z]+-[0-9a-f]{32}"', '"id":"ID"', body))


async def test_the_bytes_of_a_stream_are_these() -> None:
    engine = FakeEngine(script=lambda prompt: "Grüß", tokens_per_step=(1, 1, 1, 10))
    async with running_site(engine) as site:
        chat = await site.chat(stream=True, stream_options={"include_usage": True}, seed=3)
        text = await site.complete(stream=True, max_tokens=6, seed=3, stop="rz")
    # "r" waits for what could be a stop string, half an "ü" for its other half: neither gives an empty event
    assert golden(text.text) == GOLDEN_TEXT
    joined = golden(chat.text).replace(
        '"delta":{"content":"r"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":[{"index":0,'
        '"delta":{"content":"üß"}',
        '"delta":{"content":"rüß"}',
    )
    assert joined == GOLDEN_CHAT
    assert len({event["id"] for event in events(chat.text)[:-1]}) == 1
    for response in (chat, text):
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"


async def test_usage_comes_only_when_asked_for() -> None:
    async with running_site() as site:
        for options in (None, {}, {"include_usage": False}):
            streamed = events((await site.chat(stream=True, stream_options=options)).text)
            assert not any("usage" in event for event in streamed[:-1])
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = events((await site.chat(stream=True, stream_options=options, max_tokens=9)).text)
    counts = [event["usage"]["completion_tokens"] for event in streamed[1:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 9


async def test_each_choice_has_one_role_chunk_first_and_one_finish_reason_last() -> None:
    async with running_site() as site:
        streamed = events((await site.chat(stream=True, n=3, max_tokens=20)).text)
    for index in range(3):
        mine = [e["choices"][0] for e in streamed[:-1] if e["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(
            set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in mine[1:-1]
        )
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_a_failure_before_the_first_token_is_an_http_error_even_of_a_stream() -> None:
    for failure in ("the target is gone", RuntimeError("secret")):
        async with running_site(FakeEngine(fail_after=0, failure=failure)) as site:
            for stream in (True, False):
                response = await site.chat(stream=stream)
                assert response.status_code == 500
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "generation_failed")
                assert "secret" not in error["message"]
        await site.engine.idle()


async def test_a_failure_in_the_stream_is_an_error_event_and_then_done() -> None:
    for failure in ("the target is gone", RuntimeError("secret")):
        async with running_site(FakeEngine(tokens_per_step=(2,), fail_after=4, failure=failure)) as site:
            streamed = events((await site.complete(stream=True)).text)
            assert (await site.complete()).status_code == 500
        assert [len(event["choices"][0]["text"]) for event in streamed[:-2]] == [2, 2]
        assert streamed[-2]["error"]["code"] == "generation_failed"
        assert ("the target is gone" in streamed[-2]["error"]["message"]) == isinstance(failure, str)
        assert "secret" not in streamed[-2]["error"]["message"]
        assert streamed[-1] == "[DONE]"


async def test_one_failed_choice_ends_the_others() -> None:
    async with running_site(FakeEngine(tokens_per_step=(2,), fail_after=4)) as site:
        streamed = events((await site.complete(stream=True, n=3)).text)
        assert sum("error" in event for event in streamed[:-1]) == 1
        assert streamed[-1] == "[DONE]"
        await site.engine.idle()


async def test_a_client_that_goes_away_cancels_its_stream() -> None:
    async with running_site() as site:
        site.engine.gate.hold()
        site.engine.gate.allow(3)
        async with site.client.stream("POST", "/v1/completions", json=asking(stream=True)) as response:
            assert await anext(response.aiter_lines())
            assert len(site.engine.running) == 1
        await site.engine.idle()


async def test_a_client_that_goes_away_cancels_what_it_does_not_stream() -> None:
    async with running_site() as site:
        site.engine.gate.hold()
        for stream in (False, True):
            asked = asyncio.create_task(site.complete(n=2, stream=stream))
            await site.engine.until(lambda engine: len(engine.running) == 2)
            asked.cancel()
            await site.engine.idle()


async def test_a_waiting_request_whose_client_goes_away_leaves_the_queue() -> None:
    async with running_site(FakeEngine(max_running=1)) as site:
        site.engine.gate.hold()
        first = asyncio.create_task(site.complete(max_tokens=4))
        await site.engine.until(lambda engine: bool(engine.running))
        second = asyncio.create_task(site.complete())
        await site.engine.until(lambda engine: bool(engine.waiting))
        second.cancel()
        await site.engine.until(lambda engine: not engine.waiting)
        site.engine.gate.open()
        assert (await first).status_code == 200


async def test_a_hundred_aborts_leave_nothing_behind() -> None:
    async with running_site(FakeEngine(max_running=4, max_waiting=200)) as site:
        site.engine.gate.hold()
        asked = [asyncio.create_task(site.complete(stream=i % 2 == 0)) for i in range(100)]
        await site.engine.until(lambda engine: len(engine.specs) == 100)
        for one in asked:
            one.cancel()
        await site.engine.idle()
        site.engine.gate.open()
        assert (await site.complete(max_tokens=2)).status_code == 200


def asking(**body: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 200, **body}


class StalledReader:
    """An ASGI client that takes the first piece of a stream (`started`) and no more before `reads` is set."""

    def __init__(self, engine: FakeEngine) -> None:
        self.sent: list[bytes] = []
        self.started, self.reads, self.hung_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        body = json.dumps({"prompt": "hi", "max_tokens": 200, "stream": True, "seed": 1}).encode()
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        app = create_app(engine, TinyTokenizer(), HttpSettings(version="1"))
        self.serving = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            self.started.set()
            await self.reads.wait()


async def test_a_reader_that_stalls_gets_merged_steps_and_never_holds_up_the_engine() -> None:
    engine = FakeEngine(tokens_per_step=(1,))
    reader = StalledReader(engine)
    await engine.until(lambda engine: bool(engine.specs) and not engine.running)
    assert len(reader.sent) == 1
    reader.reads.set()
    await reader.serving
    assert len(reader.sent) == 3
    streamed = events(b"".join(reader.sent).decode())
    assert sum(len(event["choices"][0]["text"]) for event in streamed[:-1]) == 200
    assert streamed[-1] == "[DONE]"


async def test_a_reader_that_stalls_and_hangs_up_cancels_its_generations() -> None:
    engine = FakeEngine()
    engine.gate.hold()
    engine.gate.allow(1)
    reader = StalledReader(engine)
    await reader.started.wait()
    reader.hung_up.set()
    await engine.idle()
    reader.reads.set()
    await reader.serving


async def test_a_response_that_is_cut_off_cancels_its_generations() -> None:
    engine = FakeEngine()
    engine.gate.hold()
    engine.gate.allow(1)
    reader = StalledReader(engine)
    await reader.started.wait()
    reader.serving.cancel()
    await engine.idle()


async def test_the_events_of_one_step_travel_in_one_send() -> None:
    engine = FakeEngine(script=lambda prompt: "abc", tokens_per_step=(9,))
    async with (
        running_site(engine) as site,
        site.client.stream("POST", "/v1/chat/completions", json=chatting()) as response,
    ):
        pieces = [piece async for piece in response.aiter_raw()]
    assert pieces[0].count(b"data: ") == 4  # role, text, finish, [DONE]


def chatting() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": True}
