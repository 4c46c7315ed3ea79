"""`python -m bench`: Paceline, with and without its drafter, beside every peer that is installed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bench.figures import Figures, figures_of, summarise
from bench.load import BenchError, drive
from bench.prompts import PROMPTS_PATH, Prompt, load_prompts, spread
from bench.report import markdown, plot
from bench.servers import BASELINE, Server, all_servers, running

WARM_UP_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    servers: list[Server]
    prompts: list[Prompt]
    streams: list[int]
    rounds: int
    max_tokens: int


def free_ports() -> tuple[int, int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        first, second = (one.getsockname()[1] for one in sockets)
        return first, second


def measure(plan: Plan, server: Server, round_: int) -> list[Figures]:
    """Start the server, warm it up, drive it at every number of streams, stop it. Raises BenchError."""
    measured = []
    with running(server, free_ports()) as base_url:
        warm_up = plan.prompts[:WARM_UP_PROMPTS]
        asyncio.run(drive(base_url, server.model, warm_up, WARM_UP_PROMPTS, plan.max_tokens))
        for streams in plan.streams:
            answers = asyncio.run(drive(base_url, server.model, plan.prompts, streams, plan.max_tokens))
            figures = figures_of(server.name, streams, round_, answers)
            print(
                f"round {round_} · {server.name} · {streams} streams: {figures.tokens_per_s:.1f} tok/s, "
                f"first token {1e3 * figures.first_token_s:.0f} ms",
                flush=True,
            )
            measured.append(figures)
    return measured


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
            if server.name in missing:
                continue
            try:
                figures += measure(plan, server, round_)
            except* BenchError as group:
                error = group.exceptions[0]
                print(f"{server.name}: {error}", file=sys.stderr, flush=True)
                missing[server.name] = f"failed: {str(error).splitlines()[0]}"
    return [one for one in figures if one.server not in missing], missing


def plan_of(arguments: argparse.Namespace) -> Plan:
    servers = all_servers(arguments.threads)
    if arguments.servers:
        servers = [one for one in servers if any(part in one.name for part in arguments.servers.split("+"))]
    if not servers:
        raise SystemExit(f"--servers {arguments.servers}: no server's name holds any of these")
    prompts = load_prompts(arguments.full or PROMPTS_PATH)
    if arguments.prompts:
        prompts = spread(prompts, arguments.prompts)
    streams = [int(count) for count in arguments.streams.split(",")]
    return Plan(servers, prompts, streams, arguments.rounds, arguments.max_tokens)


def _leave(signum: int, frame: object) -> None:
    """Ends by an exception, so that the server that runs is stopped."""
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Compare servers on one machine.")
    parser.add_argument("--full", type=Path, metavar="FILE", help="all questions of this Spec-Bench file")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="only N, spread over the groups")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--streams", default="1,8", metavar="N,…", help="answers under way at once (1,8)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over these (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each model")
    parser.add_argument("--servers", metavar="A+B", help="only those whose names hold A or B")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    plan = plan_of(arguments)
    figures, missing = compare(plan)
    summaries = summarise(figures, BASELINE)
    table = markdown(summaries, missing, BASELINE)
    print("\n" + table)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "threads": arguments.threads,
        "missing": missing,
        "summaries": [asdict(one) for one in summaries],
        "figures": [asdict(one) for one in figures],
    }
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    (out / "results.md").write_text(table)
    if summaries:
        (out / "results.svg").write_text(plot(summaries))
    print(f"written to {out}: results.json, results.md, results.svg")
    return 0 if figures else 1


if __name__ == "__main__":
    raise SystemExit(main())
