"""Throughput: the same prompts to every server, one answer and several under way."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from bench.figures import Figures, figures_of
from bench.load import BenchError, drive
from bench.prompts import Prompt
from bench.servers import Server, free_ports, running


@dataclass(frozen=True, slots=True)
class Plan:
    servers: list[Server]
    prompts: list[Prompt]
    streams: list[int]
    rounds: int
    max_tokens: int


def measure(plan: Plan, server: Server, streams: int, round_: int) -> Figures:
    """Start the server, warm it up, drive it, stop it. Raises BenchError.

    A server that had been asked the prompts before would have them in its prefix cache.
    """
    with running(server, free_ports()) as base_url:
        asyncio.run(drive(base_url, server.model, warm_up(streams), streams, plan.max_tokens))
        answers = asyncio.run(drive(base_url, server.model, plan.prompts, streams, plan.max_tokens))
    figures = figures_of(server.name, streams, round_, answers)
    rates = figures.rates
    print(
        f"round {round_} · {server.name} · {streams} streams: {rates.tokens_per_s:.1f} tok/s, "
        f"decode {rates.decode_tokens_per_s:.1f} tok/s per stream, "
        f"first token {1e3 * rates.first_token_s:.0f} ms",
        flush=True,
    )
    return figures


def warm_up(streams: int) -> list[Prompt]:
    """Two prompts that begin like none that is measured, or one for every stream."""
    return [
        Prompt(-number, "", f"{number} is a number. Write a story of {number} towns. " + "It rains. " * 40)
        for number in range(1, max(2, streams) + 1)
    ]


def compare(plan: Plan) -> tuple[list[Figures], dict[str, str]]:
    """Every round measures every server once. The second result says why a server has no figures.

    One server runs at a time, because on few cores an idle neighbour still costs something; the order turns
    round in every second round, so that no server always follows the same one.
    """
    missing = {server.name: server.missing for server in plan.servers if server.missing}
    servers = [server for server in plan.servers if not server.missing]
    figures: list[Figures] = []
    for round_ in range(1, plan.rounds + 1):
        for server in servers if round_ % 2 else reversed(servers):
            for streams in plan.streams:
                if server.name in missing:
                    continue
                try:
                    figures.append(measure(plan, server, streams, round_))
                except* BenchError as group:
                    error = group.exceptions[0]
                    print(f"{server.name}: {error}", file=sys.stderr, flush=True)
                    missing[server.name] = f"failed: {str(error).splitlines()[0]}"
    return [one for one in figures if one.server not in missing], missing
