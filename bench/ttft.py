"""Time to first token of a long prompt that a server has not seen, and of the same prompt again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import httpx

from bench.compare import warm_up
from bench.load import ANSWER_TIMEOUT_S, Answer, BenchError, ask, drive
from bench.peers import DEMO_MODEL
from bench.prompts import Prompt
from bench.servers import Server, free_ports, running
from common.model.catalog import resolve_model
from common.model.tokenizer import Tokenizer, load_tokenizer

MAX_TOKENS = 4


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """One server in one round: medians over prompts, in seconds. prompt_tokens: of the longest, template
    included."""

    server: str
    round: int
    prompt_tokens: int
    fresh_s: float
    repeated_s: float


def long_prompts(texts: Sequence[str], tokens: int, count: int) -> list[Prompt]:
    """count prompts of so many tokens that share no beginning, made of these texts."""
    tokenizer = load_tokenizer(resolve_model(DEMO_MODEL).path)
    return [
        Prompt(number, "", _cut(tokenizer, f"Document {number}. ", texts[number % len(texts) :], tokens))
        for number in range(1, count + 1)
    ]


def _cut(tokenizer: Tokenizer, start: str, texts: Sequence[str], tokens: int) -> str:
    joined, ids = start, tokenizer.encode(start, add_special=False)
    for text in cycle(texts):
        joined += text + "\n"
        ids = tokenizer.encode(joined, add_special=False)
        if len(ids) >= tokens:
            break
    return tokenizer.decode(ids[:tokens])


def measure(server: Server, prompts: Sequence[Prompt], round_: int) -> FirstTokens:
    """Raises BenchError."""
    with running(server, free_ports()) as base_url:
        asyncio.run(drive(base_url, server.model, warm_up(1), 1, MAX_TOKENS))
        asked = asyncio.run(_ask_twice(base_url, server.model, prompts))
    fresh, repeated = [one for one, _ in asked], [one for _, one in asked]
    figures = FirstTokens(
        server.name,
        round_,
        max(one.prompt_tokens for one in fresh),
        median(one.first_text_at - one.sent_at for one in fresh),
        median(one.first_text_at - one.sent_at for one in repeated),
    )
    print(
        f"round {round_} · {server.name}: {figures.prompt_tokens} tokens, "
        f"first token {1e3 * figures.fresh_s:.0f} ms, repeated {1e3 * figures.repeated_s:.0f} ms",
        flush=True,
    )
    return figures


async def _ask_twice(base_url: str, model: str, prompts: Sequence[Prompt]) -> list[tuple[Answer, Answer]]:
    async with httpx.AsyncClient(base_url=base_url, timeout=ANSWER_TIMEOUT_S) as client:
        return [
            (await ask(client, model, prompt, MAX_TOKENS), await ask(client, model, prompt, MAX_TOKENS))
            for prompt in prompts
        ]


def compare(
    servers: Sequence[Server], prompts: Sequence[Prompt], rounds: int
) -> tuple[list[FirstTokens], dict[str, str]]:
    """As bench.compare.compare; every round starts every server anew, with nothing cached."""
    missing = {server.name: server.missing for server in servers if server.missing}
    figures = []
    for round_ in range(1, rounds + 1):
        for server in servers if round_ % 2 else reversed(servers):
            if server.name in missing:
                continue
            try:
                figures.append(measure(server, prompts, round_))
            except* BenchError as group:
                error = group.exceptions[0]
                print(f"{server.name}: {error}", file=sys.stderr, flush=True)
                missing[server.name] = f"failed: {str(error).splitlines()[0]}"
    return [one for one in figures if one.server not in missing], missing


def markdown(figures: Sequence[FirstTokens], missing: dict[str, str], baseline: str) -> str:
    base = {one.round: one.fresh_s for one in figures if one.server == baseline}
    lines = [
        f"| server | prompt tokens | first token ms | over {baseline} | repeated ms | fresh ÷ repeated "
        "| rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for server in dict.fromkeys(one.server for one in figures):
        ones = [one for one in figures if one.server == server]
        over = [one.fresh_s / base[one.round] for one in ones if one.round in base]
        cells = [
            str(ones[0].prompt_tokens),
            f"{1e3 * median(one.fresh_s for one in ones):.0f}",
            f"{median(over):.2f}" if over else "–",
            f"{1e3 * median(one.repeated_s for one in ones):.0f}",
            f"{median(one.fresh_s / one.repeated_s for one in ones):.1f}",
            str(len(ones)),
        ]
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    lines += [f"| {server} | {why} | | | | | |" for server, why in missing.items()]
    return "\n".join(lines) + "\n"
