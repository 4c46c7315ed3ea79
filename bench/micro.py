"""Microbenchmarks: a target step, a draft, a hop, the gateway's work per round, `/health` under prefill.

`python -m bench.micro [step|draft|hop|gateway|health ...] [--threads N] [--repeats N]`
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import zmq
import zmq.asyncio

from bench.health import health
from bench.micro_draft import draft_costs
from bench.peers import DEMO_MODEL
from common.kv.lengths import pages_for
from common.messages.lifecycle import Configure, Configured, TargetHello
from common.messages.rounds import AdmitAnswer, Verdict, VerdictRow, Verify
from common.messages.stamp import PROTOCOL_VERSION, Stamp
from common.model.catalog import resolve_model
from common.model.load import load_model
from common.sampling.params import SamplingParams
from services.gateway import events as ev
from services.gateway.coordinator import Coordinator
from services.gateway.options import CoordinatorOptions, FixedK
from services.target.runner import TargetRunner
from services.target.work import PrefillChunk, RoundWork, TreeRows

PAGE_SIZE = 16
CONTEXTS = (100, 400, 1600)
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
"""Slots, and rows of each: a bonus token and a chain of draft tokens."""
GATEWAY_SLOTS = (1, 8, 64, 256)


def median_us(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e6 * median(times)


def target_steps(repeats: int) -> None:
    """Device time of a verify round of the demo model, by slots, rows and context."""
    longest = max(CONTEXTS)
    slots = max(slots for slots, _ in SHAPES)
    slot_pages = pages_for(longest + 16, PAGE_SIZE)
    model = load_model(resolve_model(DEMO_MODEL).path, dtype=torch.bfloat16, max_positions=longest + 16)
    runner = TargetRunner(model, model.config.vocab_size)
    pages = slots * slot_pages + 1
    with torch.inference_mode():
        runner.allocate(Configure(1, 1, pages, PAGE_SIZE, slots, longest + 16, 9))
        tables = [tuple(range(1 + at * slot_pages, 1 + (at + 1) * slot_pages)) for at in range(slots)]
        ids = tuple(100 + at % 4000 for at in range(longest))
        for slot, table in enumerate(tables, start=1):
            for start in range(0, longest, 256):
                chunk = PrefillChunk(slot, table, start, ids[start : start + 256])
                runner.execute(RoundWork(0, 0, (chunk,), ()))
        print("| context | " + " | ".join(f"{count}×{rows} ms" for count, rows in SHAPES) + " |")
        print("|---" * (1 + len(SHAPES)) + "|")
        for context in CONTEXTS:
            cells = []
            for count, rows in SHAPES:
                chain = tuple(range(100, 100 + rows))
                trees = tuple(
                    TreeRows(
                        slot, tables[slot - 1], context, chain, tuple(range(-1, rows - 1)), SamplingParams()
                    )
                    for slot in range(1, count + 1)
                )
                work = RoundWork(0, 1, (), trees)
                cells.append(median_us(partial(runner.execute, work), repeats) / 1e3)
            print(f"| {context} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |", flush=True)


def _echo(address: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    while message := socket.recv():
        socket.send(message)


def hop(repeats: int) -> None:
    """Round trip of a small frame between an asyncio loop and a blocking peer, over ipc://."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'echo'}"
        peer = multiprocessing.get_context("spawn").Process(target=_echo, args=(address,), daemon=True)
        peer.start()
        times_us = asyncio.run(_round_trips(address, 20 * repeats))
        peer.join(5.0)
    print(f"round trip over ipc://: median {median(times_us):.0f} µs, a hop is half of it")


async def _round_trips(address: str, count: int) -> list[float]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.bind(address)
    times_us = []
    for _ in range(count):
        started = time.perf_counter()
        await socket.send(b"x" * 200)
        await socket.recv()
        times_us.append(1e6 * (time.perf_counter() - started))
    await socket.send(b"")
    context.destroy(linger=1000)
    return times_us


class _Silent:
    def push(self, token_id: int) -> str | None:
        return None


class _LoneTarget:
    """A Coordinator whose target answers every row with one token."""

    def __init__(self, slots: int) -> None:
        ids = itertools.count(1)
        options = CoordinatorOptions(
            max_model_len=1 << 20, kv_memory_bytes=1 << 30, max_num_seqs=slots, max_rows=1 << 16
        )
        self.coordinator = Coordinator(options, FixedK(0), lambda: next(ids))
        self.verify: Verify | None = None
        self._now = 0.0
        self._feed(ev.Start())
        hello = TargetHello(500, PROTOCOL_VERSION, "m", 1000, "t", "plan", "cpu", 64, 1 << 20, 1 << 16)
        self._feed(ev.Received("target", hello))
        epoch = self.coordinator.epoch
        self._feed(ev.Received("target", Configured(epoch, 500, "endpoint")))
        self._stamp = Stamp(epoch, 500, 0)
        for request in range(1, slots + 1):
            self._feed(ev.Submit(request, (1, 2), SamplingParams(), 1 << 19, _Silent(), 0))
        for _ in range(3):
            self.answer()

    def _feed(self, event: ev.Event) -> None:
        self._now += 0.001
        for effect in self.coordinator.handle(event, self._now):
            if isinstance(effect, ev.Send) and isinstance(effect.message, Verify):
                self.verify = effect.message

    def answer(self) -> None:
        """One round: the verdict in, the next Verify out."""
        verify = self.verify
        assert verify is not None
        rows = []
        for row in verify.live:
            base = row.commit.start + len(row.commit.ids)
            kv = base if row.verify else row.chunk_end
            status, ids = ("ok", [7]) if row.verify else ("prefilled", [])
            rows.append(VerdictRow(row.request, row.slot, 1, status, base, kv, kv + 16, ids))
        admitted = [AdmitAnswer(one.request, "ok", one.request, 1, 0, 64) for one in verify.admits]
        verdict = Verdict(self._stamp, 0, verify.round, rows, admitted, "none", 1 << 20, 0, 10)
        self._feed(ev.Received("target", verdict))


def gateway_rounds(repeats: int) -> None:
    """Coordinator.handle from a verdict to the next Verify, the building of the verdict here included."""
    for slots in GATEWAY_SLOTS:
        target = _LoneTarget(slots)
        assert target.verify is not None
        assert len(target.verify.live) == slots
        print(f"gateway, {slots} slots: {median_us(target.answer, 10 * repeats):.0f} µs a round", flush=True)


def health_under_prefill(repeats: int) -> None:
    """Of a whole stack, with as many threads as this process was given."""
    health(torch.get_num_threads())


PARTS: dict[str, Callable[[int], None]] = {
    "step": target_steps,
    "draft": draft_costs,
    "hop": hop,
    "gateway": gateway_rounds,
    "health": health_under_prefill,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.micro", description="Costs of the parts of a round."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of the model"
    )
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="medians are over these (15)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}: {', '.join(PARTS)}")
    torch.set_num_threads(arguments.threads)
    for name in arguments.parts or PARTS:
        PARTS[name](arguments.repeats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
