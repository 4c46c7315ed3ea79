"""Streaming chat completions over HTTP, and what they took as a client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec

from bench.prompts import Prompt

ANSWER_TIMEOUT_S = 300.0
_DATA = "data: "
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds of one clock. Token counts are those of the server's usage block."""

    group: str
    prompt_tokens: int
    completion_tokens: int
    sent_at: float
    first_text_at: float
    ended_at: float


class BenchError(Exception):
    """One line: which server answered what."""


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Frame(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


async def drive(
    base_url: str, model: str, prompts: Sequence[Prompt], streams: int, max_tokens: int
) -> list[Answer]:
    """Ask every prompt, greedily, with `streams` of them under way at any time. Raises BenchError."""
    waiting = iter(prompts)
    answers: list[Answer] = []
    # A connection of its own for each: llama-server closes one that a request is just being sent on.
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=0)

    async def stream_one_after_another(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            answers.append(await ask(client, model, prompt, max_tokens))

    async with (
        httpx.AsyncClient(base_url=base_url, timeout=ANSWER_TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(streams):
            tasks.create_task(stream_one_after_another(client))
    return answers


async def ask(client: httpx.AsyncClient, model: str, prompt: Prompt, max_tokens: int) -> Answer:
    """One streamed answer. Raises BenchError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: _Usage | None = None
    first_text_at = 0.0
    sent_at = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode(errors="replace")[:300]
                raise BenchError(f"question {prompt.question_id}: HTTP {response.status_code}: {told}")
            async for line in response.aiter_lines():
                if not line.startswith(_DATA) or line == _DATA + _DONE:
                    continue
                frame = msgspec.json.decode(line[len(_DATA) :], type=_Frame)
                if not first_text_at and frame.choices and frame.choices[0].delta.content:
                    first_text_at = time.perf_counter()
                usage = frame.usage or usage
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise BenchError(f"question {prompt.question_id}: {error!r}") from error
    ended_at = time.perf_counter()
    if usage is None:
        raise BenchError(f"question {prompt.question_id}: the stream carried no usage block")
    return Answer(
        prompt.group,
        usage.prompt_tokens,
        usage.completion_tokens,
        sent_at,
        first_text_at or ended_at,
        ended_at,
    )
