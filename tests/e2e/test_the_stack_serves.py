"""One stack with n-gram drafting, as people use it: HTTP, ZeroMQ, disconnects, bad input, kills."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

import paceline
from tests.e2e.stack import Stack, running
from tests.prompts import prompts

TIPS = {"messages": [{"role": "user", "content": "Give three tips for staying healthy."}], "temperature": 0}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running("--drafter", "ngram", "--k", "4", "--prefill-chunk", "64", draft=True) as stack:
        yield stack
        stack.wait_pool_full()


def stream_events(stack: Stack, body: dict[str, object]) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json"},
    )
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    return [line.removeprefix("data: ") for line in lines if line]


def post_stream(stack: Stack, body: dict[str, object]) -> socket.socket:
    """A raw connection with a streaming request on the way."""
    payload = json.dumps({**body, "stream": True}).encode()
    raw = socket.create_connection(("127.0.0.1", stack.port), timeout=60)
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(payload) + payload
    )
    return raw


def test_the_demo_model_answers_over_http(stack: Stack) -> None:
    status, body = stack.request("/v1/chat/completions", {**TIPS, "max_tokens": 16})
    assert status == 200
    assert body["choices"][0]["message"]["content"].startswith("1. Stay hydrated: Drink plenty of water")
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


def test_the_stream_has_the_same_text_and_ends_with_done(stack: Stack) -> None:
    _, whole = stack.request("/v1/chat/completions", {**TIPS, "max_tokens": 24})
    *events, last = stream_events(stack, {**TIPS, "max_tokens": 24})
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert last == "[DONE]"
    assert text == whole["choices"][0]["message"]["content"]


def test_an_answer_that_ends_by_itself_ends_with_stop(stack: Stack) -> None:
    body = {"messages": [{"role": "user", "content": "Say only: OK"}], "temperature": 0, "max_tokens": 200}
    _, answer = stack.request("/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]


def test_a_repeated_prompt_is_found_in_the_prefix_cache_and_says_the_same(stack: Stack) -> None:
    text = "Summarize what a river does on its way from the mountains to the sea, in four short sentences."
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 3}
    counted = stack.metric("prompt_tokens_cached_total")
    (_, first), (_, second) = (stack.request("/v1/chat/completions", body) for _ in range(2))
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 17 <= cached < usage["prompt_tokens"]
    assert second["choices"] == first["choices"]
    before = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert stack.metric("prompt_tokens_cached_total") == counted + before + cached


def test_the_zeromq_client_gets_the_text_that_http_gets(stack: Stack) -> None:
    _, body = stack.request("/v1/chat/completions", {**TIPS, "max_tokens": 16})
    with paceline.Client(stack.address) as client:
        done = client.generate(messages=TIPS["messages"], temperature=0, max_tokens=16).result()
    assert done.text == body["choices"][0]["message"]["content"]
    assert len(done.token_ids) == 16


def test_ngram_drafting_commits_more_than_1_2_tokens_per_step_on_summaries(stack: Stack) -> None:
    async def collect() -> list[paceline.Final]:
        async with paceline.AsyncClient(stack.address) as client:
            streams = [
                client.generate(messages=[{"role": "user", "content": text}], temperature=0, max_tokens=64)
                for text in prompts(per_group=4, groups={"summarization"})
            ]
            return [(await stream.result()).final for stream in streams]

    finals = asyncio.run(collect())
    tokens = sum(final.usage.completion for final in finals)
    steps = sum(final.spec.steps for final in finals)
    assert tokens / steps > 1.2


def test_a_disconnected_stream_frees_its_slot_and_pages(stack: Stack) -> None:
    with post_stream(stack, {**TIPS, "max_tokens": 1500, "ignore_eos": True}) as raw:
        while b"data: " not in raw.recv(65536):
            pass
        assert stack.metric("num_requests_running") == 1
        assert stack.metric("kv_pages_free") < stack.metric("kv_pages")
    stack.wait_pool_full()


def test_a_dropped_zeromq_iterator_frees_its_slot_and_pages(stack: Stack) -> None:
    with paceline.Client(stack.address) as client:
        for _ in client.generate("Once upon a time", max_tokens=1500, ignore_eos=True):
            break
        stack.wait_pool_full()


def test_a_prompt_of_the_context_length_is_refused_and_one_less_answers(stack: Stack) -> None:
    limit = stack.request("/v1/models")[1]["data"][0]["max_model_len"]
    refused, body = stack.request("/v1/completions", {"prompt": [5] * limit, "temperature": 0})
    answered, answer = stack.request("/v1/completions", {"prompt": [5] * (limit - 1), "temperature": 0})
    assert (refused, body["error"]["code"]) == (400, "context_length_exceeded")
    assert (answered, answer["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b'{"messages": 5}',
        b'{"prompt": "\xff\xfe"}',
        b"[]",
        b'{"prompt": ""}',
        b'{"prompt": "a", "max_tokens": 1e99}',
    ],
)
def test_bad_bodies_are_answered_with_400_and_cost_nothing_else(stack: Stack, raw: bytes) -> None:
    status, body = stack.request("/v1/completions", raw=raw)
    assert status == 400
    assert body["error"]["message"]
    stack.wait_pool_full()


def test_garbage_on_every_socket_changes_nothing(stack: Stack) -> None:
    (run_dir,) = [
        path for path in stack.folder.iterdir() if path.is_dir() and (path / "gateway.sock").exists()
    ]
    addresses = [stack.address, *(f"ipc://{run_dir / name}.sock" for name in ("gateway", "target"))]
    before = stack.request("/v1/chat/completions", {**TIPS, "max_tokens": 8})[1]["choices"]
    with zmq.Context() as context:
        for address in addresses:
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 1000)
                dealer.setsockopt(zmq.ROUTING_ID, b"draft-00000000000000ff")
                dealer.connect(address)
                for frames in ([os.urandom(64)], [b""], [b"\xc1"] * 5, [b"\x91\xa6Verify"], [b"\x92" * 4096]):
                    dealer.send_multipart(frames)
            raw = context.socket(zmq.STREAM) if address.startswith("tcp") else None
            if raw is not None:
                raw.close(0)
    after = stack.request("/v1/chat/completions", {**TIPS, "max_tokens": 8})[1]["choices"]
    assert after == before
    assert stack.process.poll() is None


@pytest.mark.parametrize("service", ["draft", "target"])
def test_a_killed_service_costs_time_and_no_text(stack: Stack, service: str) -> None:
    body = {**TIPS, "max_tokens": 120, "ignore_eos": True}
    expected = stack.request("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    with post_stream(stack, body) as raw:
        received = b""
        while received.count(b"data: ") < 20:
            received += raw.recv(65536)
        os.kill(stack.pid_of(service), signal.SIGKILL)
        while b"[DONE]" not in received:
            part = raw.recv(65536)
            assert part, received[-500:]
            received += part
    events = [line.removeprefix(b"data: ") for line in received.splitlines() if line.startswith(b"data: {")]
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == expected
    wait_for_draft(stack)


def wait_for_draft(stack: Stack) -> None:
    """Until the draft has joined whatever target there is now."""
    deadline = time.monotonic() + 60
    while stack.log.count("draft joined") <= stack.log.count("no draft"):
        assert time.monotonic() < deadline, stack.log
        time.sleep(0.1)


def test_sigterm_ends_open_streams_with_an_error_and_leaves_nothing() -> None:
    with (
        running("--drafter", "ngram", draft=True) as stack,
        post_stream(stack, {**TIPS, "max_tokens": 1500, "ignore_eos": True}) as raw,
    ):
        received = raw.recv(65536)
        while b"data: " not in received:
            received += raw.recv(65536)
        stop_s = stack.stop()
        while part := raw.recv(65536):
            received += part
        assert b'"error"' in received
        assert received.rstrip(b"0\r\n").endswith(b"data: [DONE]")
        assert stop_s < 5
        assert stack.left_behind() == []
        assert stack.process.returncode == 0
        for noise in ("Traceback", "killing it", "uvicorn"):
            assert noise not in stack.log
