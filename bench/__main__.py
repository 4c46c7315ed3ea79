"""`python -m bench`: Paceline, with and without its drafter, beside every peer that is installed.

`python -m bench ttft`: the time to the first token of a long prompt, fresh and repeated.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from bench import ttft
from bench.compare import Plan, compare
from bench.figures import summarise
from bench.prompts import PROMPTS_PATH, load_prompts, spread
from bench.report import markdown, plot
from bench.servers import BASELINE, Server, all_servers

COMPARE, TTFT = MEASUREMENTS = ("compare", "ttft")


def chosen_servers(arguments: argparse.Namespace) -> list[Server]:
    servers = all_servers(arguments.threads)
    if arguments.servers:
        servers = [one for one in servers if any(part in one.name for part in arguments.servers.split("+"))]
    if not servers:
        raise SystemExit(f"--servers {arguments.servers}: no server's name holds any of these")
    return servers


def plan_of(arguments: argparse.Namespace) -> Plan:
    prompts = load_prompts(arguments.full or PROMPTS_PATH)
    if arguments.prompts:
        prompts = spread(prompts, arguments.prompts)
    streams = [int(count) for count in arguments.streams.split(",")]
    return Plan(chosen_servers(arguments), prompts, streams, arguments.rounds, arguments.max_tokens)


def record(arguments: argparse.Namespace, missing: dict[str, str]) -> dict[str, object]:
    return {
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "threads": arguments.threads,
        "missing": missing,
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


def throughput(arguments: argparse.Namespace) -> bool:
    """Whether anything was measured."""
    plan = plan_of(arguments)
    figures, missing = compare(plan)
    summaries = summarise(figures, BASELINE)
    table = markdown(figures, summaries, missing, BASELINE)
    print("\n" + table)
    out: Path = arguments.out
    measured = {
        "prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "summaries": [asdict(one) for one in summaries],
        "figures": [asdict(one) for one in figures],
    }
    write_json(out / "results.json", record(arguments, missing) | measured)
    (out / "results.md").write_text(table)
    if summaries:
        (out / "results.svg").write_text(plot(summaries))
    print(f"written to {out}: results.json, results.md, results.svg")
    return bool(figures)


def first_tokens(arguments: argparse.Namespace) -> bool:
    """Whether anything was measured."""
    texts = [one.text for one in load_prompts(arguments.full or PROMPTS_PATH)]
    prompts = ttft.long_prompts(texts, arguments.prompt_tokens, arguments.prompts or 5)
    figures, missing = ttft.compare(chosen_servers(arguments), prompts, arguments.rounds)
    table = ttft.markdown(figures, missing, BASELINE)
    print("\n" + table)
    out: Path = arguments.out
    measured = {"prompts": len(prompts), "figures": [asdict(one) for one in figures]}
    write_json(out / "ttft.json", record(arguments, missing) | measured)
    (out / "ttft.md").write_text(table)
    print(f"written to {out}: ttft.json, ttft.md")
    return bool(figures)


def _leave(signum: int, frame: object) -> None:
    """Ends by an exception, so that the server that runs is stopped."""
    raise SystemExit(128 + signum)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Compare servers on one machine.")
    parser.add_argument("what", nargs="?", choices=MEASUREMENTS, default=COMPARE, help="throughput, or ttft")
    parser.add_argument("--full", type=Path, metavar="FILE", help="all questions of this Spec-Bench file")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="only N, spread over the groups")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--prompt-tokens", type=int, default=1500, metavar="N", help="of ttft's (1500)")
    parser.add_argument("--streams", default="1,8", metavar="N,…", help="answers under way at once (1,8)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over these (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each model")
    parser.add_argument("--servers", metavar="A+B", help="only those whose names hold A or B")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    arguments.out.mkdir(parents=True, exist_ok=True)
    measured = throughput(arguments) if arguments.what == COMPARE else first_tokens(arguments)
    return 0 if measured else 1


if __name__ == "__main__":
    raise SystemExit(main())
