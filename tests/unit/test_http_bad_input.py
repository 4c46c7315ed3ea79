"""Bad input gets a clear answer, names the field at fault and costs nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from fake_engine import FakeEngine
from http_harness import MESSAGES, Site, running_site

JSON = {"Content-Type": "application/json"}


async def check_refused(
    site: Site,
    path: str,
    body: dict[str, Any],
    param: str | None,
    code: str = "invalid_value",
    status: int = 400,
) -> str:
    response = await site.client.post(path, json=body)
    assert response.status_code == status, (body, response.text)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), (body, error)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 1000
    return str(error["message"])


async def test_a_body_that_is_no_json_object_is_refused() -> None:
    bodies = [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"text"',
        b'{"prompt": "hi",}',
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        rb'{"model": "\ud800"}',
        rb'{"model": "x\udfff y"}',
        b"\x00\x01",
        b'{"x": ' + b"[" * 100_000,
        b'{"logit_bias": ' + b"[" * 100_000,
    ]
    async with running_site() as site:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for body in bodies:
                response = await site.client.post(path, content=body, headers=JSON)
                assert response.status_code == 400, (path, body[:40])
                error = response.json()["error"]
                assert error["code"] == "invalid_json", (path, body[:40], error)
                assert error["param"] is None
                assert len(response.content) < 1500
        assert not site.engine.specs


async def test_a_body_that_is_not_declared_as_json_is_refused() -> None:
    async with running_site() as site:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
            response = await site.client.post(
                "/v1/completions", content=b'{"prompt": "hi"}', headers={"Content-Type": kind}
            )
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_content_type"
        good = {"Content-Type": "Application/JSON; charset=utf-8"}
        response = await site.client.post(
            "/v1/completions", content=b'{"prompt": "hi", "max_tokens": 1}', headers=good
        )
        assert response.status_code == 200


async def test_a_body_beyond_the_cap_is_413_declared_or_chunked() -> None:
    async with running_site(max_body_bytes=1000) as site:

        async def chunked() -> Any:
            for _ in range(20):
                yield b" " * 100

        for content in (b" " * 1001, chunked()):
            response = await site.client.post("/v1/completions", content=content, headers=JSON)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert (await site.complete(max_tokens=1)).status_code == 200


async def test_numbers_out_of_bounds_are_refused_by_name() -> None:
    bad: dict[str, list[Any]] = {
        "temperature": [-0.1, 2.1, 1e300, "1", True, [1]],
        "top_p": [0, -1, 1.01, "x"],
        "top_k": [-2, 2**31, 10**400, 1.5, 1.0],
        "min_p": [-0.01, 1.01, {}],
        "seed": [2**64, -(2**63) - 1, 10**400, 0.5, "1"],
        "max_tokens": [0, -1, 2**31, 10**400, 1.0, "5", False],
        "n": [0, -1, 129, 10**400, 1.5],
        "priority": [2**31, 10**400, "high"],
        "stop_token_ids": [[258], [-1], [10**400], ["a"], 5, list(range(65))],
        "ignore_eos": [1, "yes"],
        "stream": [1, "true"],
    }
    async with running_site() as site:
        for name, values in bad.items():
            for value in values:
                body = {"messages": MESSAGES, "prompt": "hi", name: value}
                for path in ("/v1/completions", "/v1/chat/completions"):
                    response = await site.client.post(path, json=body)
                    error = response.json()["error"]
                    assert response.status_code == 400, (name, value)
                    assert error["param"].partition("[")[0] == name, (name, value, error)
                    assert error["code"] == "invalid_value"
                    assert len(response.content) < 1500
        raw = b'{"prompt": "hi", "temperature": 1e999}'
        response = await site.client.post("/v1/completions", content=raw, headers=JSON)
        assert response.json()["error"]["param"] == "temperature"
        for value in (0, -1, 2**31, 10**400):
            body = {"messages": MESSAGES, "max_completion_tokens": value}
            await check_refused(site, "/v1/chat/completions", body, "max_completion_tokens")
        assert not site.engine.specs


async def test_stops_that_cannot_be_are_refused() -> None:
    async with running_site() as site:
        for stop in ([""], "", ["a", ""], ["a"] * 5, "x" * 257):
            await check_refused(site, "/v1/completions", {"prompt": "hi", "stop": stop}, "stop")
        for stop in ([1], 5, {"a": 1}, [["a"]]):
            response = await site.complete(stop=stop)
            assert response.json()["error"]["param"].partition("[")[0] == "stop"
        assert (await site.complete(stop=["a", "b", "c", "d"])).status_code == 200
        assert (await site.complete(stop=[])).status_code == 200


async def test_prompts_that_cannot_be_are_refused() -> None:
    bad: list[tuple[Any, str]] = [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        ([[]], "prompt"),
        (["a", ""], "prompt"),
        (None, "prompt"),
        (["a", 1], "prompt"),
        ([1, "a"], "prompt"),
        ([[1], "a"], "prompt"),
        ([258], "prompt"),
        ([-1], "prompt"),
        ([10**30], "prompt"),
        ([[1, 2], [3, 999]], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, 2.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[["a"]]], "prompt[0][0]"),
    ]
    async with running_site() as site:
        for prompt, param in bad:
            await check_refused(site, "/v1/completions", {"prompt": prompt}, param)
        await check_refused(site, "/v1/completions", {}, "prompt")
        await check_refused(site, "/v1/completions", {"prompt": ["a"] * 129}, "prompt")
        await check_refused(site, "/v1/completions", {"prompt": ["a"] * 65, "n": 2}, "n")
        assert not site.engine.specs


async def test_messages_that_cannot_be_are_refused() -> None:
    user = {"role": "user", "content": "hi"}
    bad: list[tuple[Any, str]] = [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([user, {"role": "wizard", "content": "hi"}], "messages[1].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "assistant", "content": "I go first"}], "messages"),
    ]
    async with running_site() as site:
        for messages, param in bad:
            await check_refused(site, "/v1/chat/completions", {"messages": messages}, param)
        await check_refused(site, "/v1/chat/completions", {}, "messages")
        for extra in ({"role": "tool"}, {"tool_calls": [{}]}, {"function_call": {"name": "f"}}):
            name = next(iter(extra))
            await check_refused(
                site,
                "/v1/chat/completions",
                {"messages": [{**user, **extra}]},
                f"messages[0].{name}",
                "unsupported_value",
            )
        assert not site.engine.specs


async def test_known_fields_that_are_not_built_are_refused_by_name() -> None:
    shared: dict[str, Any] = {
        "presence_penalty": 0.1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_object"},
        "guided_json": {"type": "object"},
        "min_tokens": 3,
        "echo": True,
    }
    chat = {
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "functions": [{}],
        "audio": {"voice": "x"},
        "modalities": ["text", "audio"],
        "store": True,
        "prediction": {"type": "content", "content": "x"},
    }
    text = {"logprobs": 1, "best_of": 2, "suffix": "the end"}
    async with running_site() as site:
        for name, value in {**shared, **chat}.items():
            body = {"messages": MESSAGES, name: value}
            await check_refused(site, "/v1/chat/completions", body, name, "unsupported_value")
        for name, value in {**shared, **text, "logprobs": 0}.items():
            await check_refused(
                site, "/v1/completions", {"prompt": "hi", name: value}, name, "unsupported_value"
            )
        for name, value in {"presence_penalty": False, "logprobs": 0, "echo": 0, "tools": {}}.items():
            body = {"messages": MESSAGES, name: value}
            await check_refused(site, "/v1/chat/completions", body, name, "unsupported_value")
        assert not site.engine.specs


async def test_stream_options_without_stream_are_refused() -> None:
    async with running_site() as site:
        for stream in (None, False):
            body = {"prompt": "hi", "stream": stream, "stream_options": {"include_usage": True}}
            await check_refused(site, "/v1/completions", body, "stream_options")


async def test_another_model_is_not_found() -> None:
    async with running_site() as site:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            body = {"model": "gpt-4", "prompt": "hi", "messages": MESSAGES, "tokens": [1]}
            message = await check_refused(site, path, body, "model", "model_not_found", 404)
            assert "gpt-4" in message
        huge = {"model": "x" * 10_000, "prompt": "hi"}
        await check_refused(site, "/v1/completions", huge, "model", "model_not_found", 404)


async def test_a_prompt_of_the_context_length_is_refused_and_one_less_answers() -> None:
    async with running_site(FakeEngine(max_model_len=32)) as site:
        for stream in (False, True):
            body = {"prompt": [1] * 32, "stream": stream}
            message = await check_refused(site, "/v1/completions", body, "prompt", "context_length_exceeded")
            assert "This model's maximum context length is 32 tokens. However," in message
            answer = await site.complete(prompt=[1] * 31, stream=stream)
            assert answer.status_code == 200
        assert [spec.max_tokens for spec in site.engine.specs] == [1, 1]
        long = {"messages": [{"role": "user", "content": "x" * 100}]}
        await check_refused(site, "/v1/chat/completions", long, "messages", "context_length_exceeded")


async def test_a_full_queue_is_429_with_retry_after_and_admits_none_of_the_choices() -> None:
    async with running_site(FakeEngine(max_running=1, max_waiting=1)) as site:
        site.engine.gate.hold()
        for stream in (False, True):
            response = await site.complete(n=3, stream=stream)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            await site.engine.idle()
        site.engine.gate.open()
        assert (await site.complete(n=2, max_tokens=2)).status_code == 200


async def test_an_engine_that_is_not_ready_is_503() -> None:
    engine = FakeEngine()
    async with running_site(engine) as site:
        engine.ready = False
        response = await site.chat(stream=True)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "not_ready"


async def test_error_text_is_cut_short() -> None:
    async with running_site() as site:
        role = [{"role": "user", "content": [{"type": "x" * 100_000}]}]
        for body in ({"messages": role}, {"messages": MESSAGES, "model": "m" * 100_000}):
            response = await site.client.post("/v1/chat/completions", json=body)
            assert 400 <= response.status_code < 500
            assert len(response.content) < 1500


async def test_a_bug_is_a_500_that_tells_nothing_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def buggy(spec: object) -> None:
        raise RuntimeError("secret")

    async with running_site() as site:
        with monkeypatch.context() as patched:
            patched.setattr(site.engine, "submit", buggy)
            response = await site.chat(stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in response.text
        assert response.headers["x-request-id"]
        assert (await site.chat(max_tokens=1)).status_code == 200
        counted = (await site.client.get("/metrics")).text
    assert 'paceline:http_requests_total{path="/v1/chat/completions",status="500"} 1.0' in counted


async def test_unknown_routes_and_methods_have_the_same_error_body() -> None:
    async with running_site() as site:
        missing = await site.client.get("/v1/nothing")
        wrong = await site.client.get("/v1/completions")
        slash = await site.client.get("/v1/models/")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert slash.status_code == 404


async def test_headers_without_end_are_cut_off() -> None:
    async with running_site() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
        writer.write(b"GET /health HTTP/1.1\r\nX-Endless: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"a" * 2**14)
                await writer.drain()
        async with asyncio.timeout(10):
            status = await reader.readline()
        writer.close()
        assert b" 431 " in status


async def test_more_messages_than_the_context_are_refused_before_any_work() -> None:
    async with running_site() as site:
        messages = [{"role": "user", "content": "a"}] * (site.engine.info.max_model_len + 1)
        answer = await site.client.post("/v1/chat/completions", json={"messages": messages})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_body_over_the_limit_is_answered_though_the_client_still_sends() -> None:
    async with running_site() as site:
        answer = await site.client.post("/v1/completions", content=b" " * (9 * 2**20), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
