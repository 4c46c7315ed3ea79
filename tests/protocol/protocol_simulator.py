"""Whole lifetimes of the three machines under loss, duplication, reordering, delay, crash and restart.

Everything follows from one seed: `PYTHONPATH=. python tests/protocol/protocol_simulator.py SEED` replays it
with its trace. Every third seed runs with a measured k. One lifetime is several requests from submit until
all have ended and the page pool is full again.
"""

import contextlib
import heapq
import random
import sys
from collections import Counter
from dataclasses import replace

from protocol_watch import Watch
from protocol_world import Job, Process, ToySink, corrupt, draw_world
from toy_devices import DraftDevice, TargetDevice, Tenant
from toy_model import VOCAB, PagedMemory, Violation, expected_text
from toy_rows import RowBuffer

from common.messages.lifecycle import DraftHello, Message, TargetHello
from common.messages.rounds import Proposal
from common.messages.stamp import PROTOCOL_VERSION
from common.sampling.params import SamplingParams
from services.draft import events as dev
from services.draft.link import DraftLink
from services.draft.options import DraftOptions
from services.draft.work import DraftResult
from services.gateway import events as gev
from services.gateway.adaptive_k import AdaptiveK
from services.gateway.coordinator import Coordinator
from services.gateway.options import CoordinatorOptions, FixedK
from services.target import events as tev
from services.target.link import TargetLink
from services.target.options import TargetOptions
from services.target.work import RoundResult

MAX_STEPS = 60_000
QUIET_S = 400.0


class Simulator:
    """One lifetime. overrides: fields of the World that are set instead of drawn."""

    def __init__(self, seed: int, trace: bool = False, **overrides: object) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = replace(draw_world(self.rng), **overrides)
        self.now = 0.0
        self.steps = 0
        self.trace: list[str] | None = [] if trace else None
        self.counters: Counter[str] = Counter()
        self._queue: list[tuple[float, int, tuple]] = []
        self._sequence = 0
        self._cuts: list[tuple[frozenset[str], float, float]] = []
        self._fifo: dict[tuple[str, str], float] = {}
        self._faults_end = 3.0 + self.world.span_s
        self._next_id = 0
        world = self.world
        options = CoordinatorOptions(
            max_model_len=world.max_model_len,
            kv_memory_bytes=(world.pages - 1) * world.page_size,
            page_size=world.page_size,
            max_num_seqs=world.max_num_seqs,
            max_rows=world.max_rows,
            chunk_rows=world.chunk_rows,
            max_nodes=world.k + 1,
            groups=world.groups,
            silence_s=2.0,
            resend_s=0.2,
            round_timeout_s=10.0,
            draft_pause_s=0.1,
            draft_stuck_s=5.0,
        )
        controller = AdaptiveK(world.k, world.k) if seed % 3 == 0 else FixedK(world.k)
        self.gateway = Coordinator(options, controller, self.new_id)
        self.gateway_timers: dict[str, float] = {}
        self.watch = Watch(world, self.gateway, self.counters)
        self.jobs = self.watch.jobs
        self.target: Process | None = None
        self.draft: Process | None = None

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id * 1000 + self.rng.randrange(1000)

    # The world

    def at(self, delay_s: float, *what: object) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, what))

    def run(self) -> None:
        """Raises Violation."""
        world, rng = self.world, self.rng
        self.at(0.0, "gateway", gev.Start())
        self.at(rng.random() * 0.02, "start_target")
        if world.has_draft:
            self.at(rng.random() * 0.02 if rng.random() < 0.7 else rng.random() * 2, "start_draft")
        for number in range(1, world.requests + 1):
            self._draw_request(number)
        for what, times in (("crash_target", world.target_crashes), ("crash_draft", world.draft_crashes)):
            for _ in range(times):
                self.at(rng.random() * (0.1 + world.span_s + rng.choice((0.0, 2.0))), what)
        if world.draft_hangs:
            self.at(rng.random() * 0.5, "hang_draft")
        if world.target_hangs:
            self.at(rng.random() * 0.5, "hang_target")
        for _ in range(world.partitions):
            self._cut(rng.random() * 0.5, rng.choice((0.05, 0.5, 3.0)))
        while self._queue:
            self.now, _, what = heapq.heappop(self._queue)
            self.steps += 1
            if self.steps > MAX_STEPS or self.now > self._faults_end + QUIET_S:
                raise Violation(
                    f"not drained after {self.steps} events and {self.now:.1f} s: {self._unfinished()}"
                )
            self._step(what)
            if self.steps % 16 == 0 and self._drained():
                return
        raise Violation("no event is left")

    def _draw_request(self, number: int) -> None:
        rng, world = self.rng, self.world
        longest = world.max_model_len - 1
        length = rng.randint(1, 12) if rng.random() < 0.9 else rng.choice((longest, longest + 1))
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(length))
        if length < longest and rng.random() < world.sharing:
            head = world.common[: rng.randint(1, len(world.common))]
            if self.jobs and rng.random() < 0.5:
                before = self.jobs[rng.choice(list(self.jobs))]
                head = (*before.submit.prompt_ids, *before.sink.due)[:longest]
                head = head[: rng.randint(1, len(head))]
            prompt = (*head, *prompt[: rng.randrange(4)])[:longest]
        most = rng.choice((1, 5, 20))
        seed = rng.randrange(1 << 60)
        sink = ToySink(number, expected_text(prompt, seed, most, world.max_model_len))
        submit = gev.Submit(number, prompt, SamplingParams(seed=seed), most, sink, rng.choice((0, 0, 1)))
        self.jobs[number] = Job(submit, sink)
        at = rng.random() * world.span_s
        self.at(at, "submit", number)
        if rng.random() < world.aborts:
            self.at(at + rng.random() * 0.3, "abort", number)

    def _drained(self) -> bool:
        gateway, target = self.gateway, self.target
        if self.now < self.world.span_s or not all(job.ended for job in self.jobs.values()):
            return False
        resting = all(group.state == "idle" for group in gateway.groups)
        if not resting or target is None or target.machine.slots is None or target.hung:
            return False
        if self.draft is not None and self.draft.alive and not self.draft.hung and not gateway.draft_ready:
            return False
        if gateway.requests.by_id or gateway.requests.waiting or gateway.requests.live:
            raise Violation(f"the gateway keeps {gateway.requests.by_id} of requests that have ended")
        slots = target.machine.slots
        if not gateway.target_ready or any(gateway.requests.releases.values()):
            return False
        if slots.live or slots.retiring:
            raise Violation("the gateway rests while the target holds slots or waits for pages")
        if slots.cache.available != slots.pool.pages - 1 or slots.table.free != slots.table.slots - 1:
            raise Violation(
                f"{slots.cache.available} of {slots.pool.pages - 1} pages can be given out at the end"
            )
        return True

    def _unfinished(self) -> str:
        left = [number for number, job in self.jobs.items() if not job.ended]
        states = [group.state for group in self.gateway.groups]
        return f"requests {left}, groups {states}, {self.gateway.counters}"

    def _step(self, what: tuple) -> None:
        kind = what[0]
        if kind == "gateway":
            self._feed_gateway(what[1])
        elif kind == "submit":
            self._feed_gateway(self.jobs[what[1]].submit)
        elif kind == "abort":
            self.jobs[what[1]].aborted = True
            self._feed_gateway(gev.Abort(what[1]))
        elif kind == "timer":
            self._fire_timer(what[1], what[2], what[3])
        elif kind == "deliver":
            self._deliver(what[1], what[2], what[3])
        elif kind == "done":
            self._device_done(what[1], what[2], what[3])
        elif kind == "crash":
            self._crash(what[1], what[2])
        elif kind == "event":
            if what[1].alive:
                self._feed(what[1], what[2])
        else:
            getattr(self, f"_{kind}")()

    def _note(self, who: str, event: object, effects: list) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f} {who} ← {event}")
            self.trace += [f"            → {effect}" for effect in effects]

    # Processes

    def _start_target(self) -> None:
        hello = TargetHello(0, PROTOCOL_VERSION, "toy", VOCAB, "hash", "plan", "cpu", 1, 10_000, 10_000)
        machine = TargetLink(hello, TargetOptions(join_s=0.02, silence_s=2.0), self.new_id)
        self.target = Process("target", machine, TargetDevice(PagedMemory(self.world.page_size)))
        self._feed(self.target, tev.Start())

    @property
    def _layers(self) -> list[int]:
        return [1, 2] if self.world.captures else []

    def _start_draft(self) -> None:
        hello = DraftHello(0, PROTOCOL_VERSION, "toy", VOCAB, "hash", "cpu", 1, 16, self._layers, 7)
        machine = DraftLink(hello, DraftOptions(silence_s=2.0, self_test_s=2.0), self.new_id)
        device = DraftDevice(
            self.rng, PagedMemory(self.world.page_size), self.world.skill, self.world.branching
        )
        self.draft = Process("draft", machine, device)
        self._feed(self.draft, dev.Start())

    def _crash_target(self) -> None:
        if self.target is not None and self.target.alive:
            self._crash(self.target, "start_target")

    def _crash_draft(self) -> None:
        if self.draft is not None and self.draft.alive:
            self._crash(self.draft, "start_draft" if self.rng.random() < 0.8 else "")

    def _hang_draft(self) -> None:
        """The device never answers again; the event loop lives on until somebody ends the process."""
        if self.draft is not None and self.draft.alive:
            self.draft.hung = True
            self.at(8.0, "crash", self.draft, "start_draft")

    def _hang_target(self) -> None:
        if self.target is not None and self.target.alive:
            self.target.hung = True
            self.at(14.0, "crash", self.target, "start_target")

    def _cut(self, delay_s: float, length_s: float) -> None:
        """Nothing gets through one link, in both directions, for a while."""
        link = self.rng.choice((("gateway", "target"), ("gateway", "draft"), ("target", "draft")))
        self._cuts.append((frozenset(link), self.now + delay_s, self.now + delay_s + length_s))

    def _crash(self, process: Process, restart: str) -> None:
        if not process.alive:
            return
        self.counters[f"crash:{process.name}"] += 1
        process.alive = False
        if self.rng.random() < self.world.notice:
            self.at(self.rng.random() * 0.01, "gateway", gev.PeerLost(process.name, "process exited"))
        if restart:
            self.at(0.05 + self.rng.random() * self.rng.choice((0.1, 3.0)), restart)

    # Network

    def _send(self, source: str, to: str, message: Message) -> None:
        world, rng = self.world, self.rng
        faulty = self.now < self._faults_end
        if faulty and (rng.random() < world.drop or self._is_cut(source, to)):
            self.counters["dropped"] += 1
            return
        copies = 2 if faulty and rng.random() < world.duplicate else 1
        for _ in range(copies):
            arrival = self.now + world.latency_s * (0.5 + rng.random())
            if faulty and rng.random() < world.reorder:
                arrival += rng.random() * rng.choice((0.01, 0.1, 1.0))
            else:
                arrival = max(arrival, self._fifo.get((source, to), 0.0))
                self._fifo[source, to] = arrival
            self.at(arrival - self.now, "deliver", source, to, message)

    def _is_cut(self, source: str, to: str) -> bool:
        return any(link == {source, to} and begin <= self.now < end for link, begin, end in self._cuts)

    def _deliver(self, source: str, to: str, message: Message) -> None:
        """To whoever now lives at the address, though it may have been meant for its predecessor."""
        if to == "gateway":
            self._feed_gateway(gev.Received(source, message))
            return
        process = self.target if to == "target" else self.draft
        if process is not None and process.alive:
            received = tev.Received if to == "target" else dev.Received
            self._feed(process, received(message))

    # Timers

    def _fire_timer(self, owner: Process | None, name: str, at: float) -> None:
        timers = self.gateway_timers if owner is None else owner.timers
        if timers.get(name) != at or (owner is not None and not owner.alive):
            return
        if owner is None:
            self._feed_gateway(gev.TimerFired(name))
        else:
            fired = tev.TimerFired if owner.name == "target" else dev.TimerFired
            self._feed(owner, fired(name))

    def _set_timer(self, owner: Process | None, name: str, at: float) -> None:
        (self.gateway_timers if owner is None else owner.timers)[name] = at
        self.at(max(0.0, at - self.now), "timer", owner, name, at)

    # Gateway

    def _feed_gateway(self, event: gev.Event) -> None:
        effects = self.gateway.handle(event, self.now)
        self._note("gateway", event, effects)
        self.watch.gateway_effects(event, effects)
        for effect in effects:
            match effect:
                case gev.Send():
                    self._send("gateway", effect.peer, effect.message)
                case gev.SetTimer():
                    self._set_timer(None, effect.name, effect.at)

    # Services

    def _feed(self, process: Process, event: object) -> None:
        effects = process.machine.handle(event, self.now)
        self._note(process.name, event, effects)
        for effect in effects:
            if process.name == "target":
                self._carry_target(process, effect)
            else:
                self._carry_draft(process, effect)
        if process.name == "target":
            self.watch.target(process)
        else:
            self.watch.logs(
                (process.machine.groups.logs if process.machine.groups else ()),
                process.machine.stamp.epoch,
            )

    def _carry_target(self, process: Process, effect: tev.Effect) -> None:
        match effect:
            case tev.SendGateway():
                self._send("target", "gateway", effect.message)
            case tev.SendDraft():
                self._send("target", "draft", effect.message)
            case tev.SetTimer():
                self._set_timer(process, effect.name, effect.at)
            case tev.AllocatePool():
                if process.running is not None:
                    raise Violation("the pool is made anew under the device's feet")
                process.device.memory = PagedMemory(self.world.page_size)
                ready = tev.PoolReady(effect.configure.target, "endpoint")
                self.at(self.rng.random() * 0.01, "event", process, ready)
            case tev.AllocateDraft():
                process.tables[effect.draft] = {}
                if effect.join.capture:
                    process.buffers[effect.draft] = RowBuffer()
                ready = tev.RegionReady(effect.draft, b"manifest")
                self.at(self.rng.random() * 0.01, "event", process, ready)
            case tev.TestRegion():
                tested = tev.RegionTested(effect.draft, effect.nonce, True)
                self.at(self.rng.random() * 0.002, "event", process, tested)
            case tev.ExportRow():
                table = process.tables.get(process.machine.draft)
                if table is not None:
                    table[effect.slot] = effect.pages
            case tev.Run():
                self._run_target(process, effect.work)

    def _run_target(self, process: Process, work: object) -> None:
        if process.running is not None:
            raise Violation("the target's device is given a second round")
        key = (process.machine.incarnation, work.group, work.round)
        if key in process.executed:
            raise Violation(f"round {work.round} is executed twice")
        process.executed.add(key)
        slots = process.machine.slots
        self.watch.trees(process, work)
        self.watch.writes(slots, work)
        self.watch.capture(process, self.draft, work)
        owners = {
            number: Tenant((slot.request, slot.generation), slot.cached)
            for number, slot in slots.live.items()
        }
        process.running = (work, owners)
        if not process.hung:
            self.at(self.world.device_s * (0.5 + self.rng.random()), "done", process, work, owners)

    def _carry_draft(self, process: Process, effect: dev.Effect) -> None:
        match effect:
            case dev.SendGateway():
                self._send("draft", "gateway", effect.message)
            case dev.SendTarget():
                message = effect.message
                if isinstance(message, Proposal) and self.rng.random() < self.world.lies:
                    message = corrupt(message, self.rng)
                self._send("draft", "target", message)
            case dev.SetTimer():
                self._set_timer(process, effect.name, effect.at)
            case dev.Attach():
                process.region = process.machine.incarnation
                process.device.memory = PagedMemory(self.world.page_size)
                process.device.reach = {}
                attached = dev.Attached(process.machine.incarnation)
                self.at(self.rng.random() * 0.01, "event", process, attached)
            case dev.Detach():
                if process.running is not None:
                    raise Violation("the draft detaches while its device works in the region")
                process.region = 0
            case dev.ReadPattern():
                read = dev.PatternRead(effect.draft, effect.nonce, True)
                self.at(0.0, "event", process, read)
            case dev.Run():
                if process.running is not None:
                    raise Violation("the draft's device is given a second work")
                table = self._table_of(process)
                process.running = effect.work
                if not process.hung:
                    took = self.world.draft_s * (0.5 + self.rng.random())
                    self.at(took, "done", process, effect.work, dict(table) if table is not None else None)

    def _table_of(self, process: Process) -> dict[int, tuple[int, ...]] | None:
        """The exported page table that the draft has mapped, or None once its target is dead or has let it
        go."""
        target = self.target
        if target is None or not target.alive or target.machine.draft != process.region:
            return None
        return target.tables.get(process.region)

    def _device_done(self, process: Process, work: object, context: object) -> None:
        if not process.alive:
            return
        process.running = None
        if process.name == "target":
            self._target_done(process, work, context)
        else:
            self._draft_done(process, work, context)

    def _target_done(self, process: Process, work: object, owners: dict[int, Tenant]) -> None:
        elapsed_us = int(self.world.device_s * 1e6)
        if self.now < self._faults_end and self.rng.random() < self.world.forward_errors:
            result = RoundResult(work.group, work.round, (), elapsed_us, error="out of luck")
            self.counters["forward_errors"] += 1
        else:
            buffer = process.buffers.get(work.capture.draft) if work.capture else None
            self.watch.capture(process, self.draft, work)
            result = process.device.execute(work, owners, elapsed_us, buffer)
        self._feed(process, tev.Executed(result))

    def _draft_done(self, process: Process, work: object, table: dict[int, tuple[int, ...]] | None) -> None:
        if table is None or self._table_of(process) is None:
            self._feed(process, dev.Executed(DraftResult(work.group, work.round, (), error="region is gone")))
            return
        self.watch.draft_pages(process, self.target.machine.slots, work, table)
        buffer = self.target.buffers.get(process.region)
        for row in work.rows:
            if row.hidden:
                self.counters["rows"] += buffer.check(row)
        self._feed(process, dev.Executed(process.device.execute(work, table)))


def simulate(seed: int) -> Simulator:
    """One lifetime. On a violation the seed is replayed and its trace goes into the error."""
    simulator = Simulator(seed)
    try:
        simulator.run()
    except Exception as error:
        replay = Simulator(seed, trace=True)
        with contextlib.suppress(Exception):
            replay.run()
        tail = "\n".join((replay.trace or [])[-60:])
        kind = Violation if isinstance(error, Violation) else type(error)
        raise kind(f"seed {seed}: {error}\n{tail}") from error
    return simulator


def caught(lifetimes: int = 400, **world: object) -> str:
    """What the first lifetime that notices a broken rule says. world: what these lifetimes have in common."""
    for seed in range(lifetimes):
        try:
            Simulator(seed, **world).run()
        except (Violation, RuntimeError, IndexError, KeyError, ValueError) as error:
            return str(error)
    raise AssertionError(f"{lifetimes} lifetimes did not notice")


if __name__ == "__main__":
    replayed = Simulator(int(sys.argv[1]), trace=True)
    try:
        replayed.run()
    finally:
        print("\n".join(replayed.trace or []))
        print(replayed.world)
