"""How soon `/health` answers while long prompts are computed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import quantiles

import httpx

from bench.compare import warm_up
from bench.load import ANSWER_TIMEOUT_S, ask, drive
from bench.prompts import load_prompts
from bench.servers import free_ports, paceline, running
from bench.ttft import MAX_TOKENS, long_prompts

STREAMS = 8
PROMPT_TOKENS = 1500
POLL_EVERY_S = 0.005
IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the answers within one span, in seconds."""

    answers: int
    p50_s: float
    p99_s: float
    max_s: float


def latencies(times_s: list[float]) -> Latencies:
    """times_s: two or more."""
    cuts = quantiles(times_s, n=100, method="inclusive")
    return Latencies(len(times_s), cuts[49], cuts[98], max(times_s))


async def _poll(client: httpx.AsyncClient, done: asyncio.Event) -> list[float]:
    times_s = []
    while not done.is_set():
        started = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        times_s.append(time.perf_counter() - started)
        await asyncio.sleep(POLL_EVERY_S)
    return times_s


async def _measure(base_url: str, model: str) -> tuple[Latencies, Latencies, float]:
    """Idle, under prefill, and how long the prefill took."""
    prompts = long_prompts([one.text for one in load_prompts()], PROMPT_TOKENS, STREAMS)
    done = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=ANSWER_TIMEOUT_S) as poller,
        httpx.AsyncClient(base_url=base_url, timeout=ANSWER_TIMEOUT_S) as asker,
    ):
        asyncio.get_running_loop().call_later(IDLE_S, done.set)
        idle = await _poll(poller, done)
        done.clear()
        polling = asyncio.create_task(_poll(poller, done))
        started = time.perf_counter()
        await asyncio.gather(*(ask(asker, model, prompt, MAX_TOKENS) for prompt in prompts))
        took_s = time.perf_counter() - started
        done.set()
        busy = await polling
    return latencies(idle), latencies(busy), took_s


def health(threads: int) -> None:
    """The eight prompts come at once; `/health` is asked one at a time, with a pause of POLL_EVERY_S."""
    server = paceline("paceline, n-gram", threads, "--drafter", "ngram")
    with running(server, free_ports()) as base_url:
        asyncio.run(drive(base_url, server.model, warm_up(1), 1, MAX_TOKENS))
        idle, busy, took_s = asyncio.run(_measure(base_url, server.model))
    for name, found in (("idle", idle), (f"{STREAMS} × {PROMPT_TOKENS} tokens of prompt", busy)):
        print(
            f"/health, {name}: p50 {1e3 * found.p50_s:.1f} ms, p99 {1e3 * found.p99_s:.1f} ms, "
            f"max {1e3 * found.max_s:.1f} ms of {found.answers} answers",
            flush=True,
        )
    print(f"the prompts took {took_s:.1f} s")
