"""An Engine without a model: real queueing, steps of several tokens, cancel, failures, slow consumers.

Tokens are bytes of `tiny_tokenizer`. A token depends on the ids before it and the seed alone, or comes
from `script`; how many tokens a step commits never changes the text.
"""

from __future__ import annotations

import asyncio
import codecs
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from tiny_tokenizer import EOS_ID, VOCAB_SIZE

from services.gateway.engine import (
    AdmissionError,
    Chunk,
    EngineInfo,
    Final,
    GenerationSpec,
    SpecStats,
)

ALPHABET = b"etaoin shrdlu"


@dataclass(slots=True)
class Gate:
    """Steps run freely while `steps` is None, otherwise as many as were allowed."""

    steps: asyncio.Semaphore | None = None

    def hold(self) -> None:
        self.steps = asyncio.Semaphore(0)

    def allow(self, steps: int) -> None:
        assert self.steps is not None
        for _ in range(steps):
            self.steps.release()

    def open(self) -> None:
        if self.steps is not None:
            self.allow(1000)  # a generation waits here once: more than ever run
        self.steps = None

    async def __call__(self) -> None:
        if self.steps is None:
            await asyncio.sleep(0)
        else:
            await self.steps.acquire()


class FakeEngine:
    """tokens_per_step: cycled through by every generation; the first of a step is never a draft token.

    script: text by prompt ids; it ends with EOS. fail_after: tokens after which a generation ends with
    `failure`, as a Final if it is a string and by raising otherwise.
    """

    def __init__(
        self,
        *,
        tokens_per_step: Sequence[int] = (1, 3, 2, 5),
        k: int = 4,
        max_model_len: int = 256,
        vocab_size: int = VOCAB_SIZE,
        max_running: int = 8,
        max_waiting: int = 32,
        script: Callable[[tuple[int, ...]], str] | None = None,
        fail_after: int | None = None,
        failure: str | Exception = "the target is gone",
        cached_tokens: int = 0,
    ) -> None:
        self.info = EngineInfo(
            model="tiny",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            drafter="fake",
            created=1_700_000_000,
        )
        self.ready = True
        self.draft_ready = True
        self.shutting_down = False
        self.gate = Gate()
        self.specs: list[GenerationSpec] = []
        self.running: list[FakeGeneration] = []
        self.waiting: list[FakeGeneration] = []
        self.peak_running = 0
        self.tokens_per_step = tuple(tokens_per_step)
        self.k = k
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.script = script
        self.fail_after = fail_after
        self.failure = failure
        self.cached_tokens = cached_tokens
        self._changed = asyncio.Event()

    def submit(self, spec: GenerationSpec) -> FakeGeneration:
        if self.shutting_down:
            raise AdmissionError("shutting_down", "the engine is shutting down")
        if not self.ready:
            raise AdmissionError("not_ready", "the target is not configured")
        if len(self.running) >= self.max_running and len(self.waiting) >= self.max_waiting:
            raise AdmissionError("queue_full", f"the queue holds {self.max_waiting} requests, its limit")
        self.specs.append(spec)
        generation = FakeGeneration(self, spec)
        self.waiting.append(generation)
        self._start_waiting()
        self._changed.set()
        return generation

    async def until(self, condition: Callable[[FakeEngine], bool], timeout_s: float = 2.0) -> None:
        """Returns once requests have come or gone so that the condition holds."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    async def idle(self) -> None:
        await self.until(lambda engine: not engine.running and not engine.waiting)

    def released(self, generation: FakeGeneration) -> None:
        for where in (self.running, self.waiting):
            if generation in where:
                where.remove(generation)
        self._start_waiting()
        self._changed.set()

    def _start_waiting(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            first = min(self.waiting, key=lambda generation: generation.spec.priority)
            self.waiting.remove(first)
            self.running.append(first)
            self.peak_running = max(self.peak_running, len(self.running))
            first.start()


class FakeGeneration:
    def __init__(self, engine: FakeEngine, spec: GenerationSpec) -> None:
        self.spec = spec
        self.cancelled = False
        self.unread = 0
        self._engine = engine
        self._chunks: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self._final: Final | None = None
        self._task: asyncio.Task[None] | None = None
        self._script = engine.script(spec.prompt_ids).encode() if engine.script is not None else None
        self._text = _StoppingText(spec.stop)
        self._loop = asyncio.get_running_loop()
        self._submitted_s = self._loop.time()
        self._queue_s = self._first_token_s = 0.0
        self._ids: list[int] = []
        self._drafted = self._accepted = 0
        self._histogram = [0] * (engine.k + 1)

    @property
    def final(self) -> Final:
        assert self._final is not None, "read `final` once iteration has ended"
        return self._final

    def start(self) -> None:
        self._queue_s = self._loop.time() - self._submitted_s
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        if self._final is None:
            self.cancelled = True
            if self._task is not None:
                self._task.cancel()
            self._finish("abort")

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            self.unread -= 1
            yield chunk

    async def _run(self) -> None:
        await asyncio.sleep(0)
        for size in itertools.cycle(self._engine.tokens_per_step):
            await self._engine.gate()
            if self._step(size):
                return

    def _step(self, size: int) -> bool:
        drafted, start = self._engine.k, len(self._ids)
        text, reason, stop_reason = "", None, None
        while len(self._ids) - start < size and reason is None:
            text_of_token, reason, stop_reason = self._token()
            text += text_of_token
        committed = len(self._ids) - start
        accepted = max(0, committed - 1)
        if self._first_token_s == 0.0:
            self._first_token_s = self._loop.time() - self._submitted_s
        self._drafted += drafted
        self._accepted += accepted
        self._histogram[min(accepted, self._engine.k)] += 1
        if reason is not None:
            text += self._text.end(reason == "stop" and isinstance(stop_reason, str))
        if committed or text:
            from_draft = tuple(j < accepted for j in range(committed))
            self._chunks.put_nowait(Chunk(tuple(self._ids[start:]), text, from_draft, drafted, accepted))
            self.unread += 1
        if reason is not None:
            self._finish(reason, stop_reason)
        return reason is not None

    def _token(self) -> tuple[str, str | None, str | int | None]:
        if self._engine.fail_after is not None and len(self._ids) >= self._engine.fail_after:
            return "", "error", None
        token_id = self._next_id()
        self._ids.append(token_id)
        if token_id == EOS_ID and not self.spec.ignore_eos:
            return "", "stop", None
        if token_id in self.spec.stop_token_ids:
            return "", "stop", token_id
        text, stop = self._text.push(token_id)
        if stop is not None:
            return text, "stop", stop
        return text, "length" if len(self._ids) >= self.spec.max_tokens else None, None

    def _next_id(self) -> int:
        if self._script is not None:
            return self._script[len(self._ids)] if len(self._ids) < len(self._script) else EOS_ID
        seed = self.spec.sampling.seed if self.spec.sampling.temperature > 0 else 0
        key = repr((seed, self.spec.prompt_ids, len(self._ids), self._ids[-4:])).encode()
        return ALPHABET[zlib.crc32(key) % len(ALPHABET)]

    def _finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        error = ""
        if reason == "error":
            if isinstance(self._engine.failure, Exception):
                self._chunks.put_nowait(self._engine.failure)
            else:
                error = self._engine.failure
        self._final = Final(
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=len(self.spec.prompt_ids),
            completion_tokens=len(self._ids),
            cached_tokens=min(self._engine.cached_tokens, len(self.spec.prompt_ids) - 1),
            queue_s=self._queue_s,
            first_token_s=self._first_token_s,
            total_s=self._loop.time() - self._submitted_s,
            spec=SpecStats(sum(self._histogram), self._drafted, self._accepted, tuple(self._histogram)),
            error=error,
        )
        self._chunks.put_nowait(None)
        self._engine.released(self)


class _StoppingText:
    """Text of a growing byte sequence: holds back half characters and beginnings of stop strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is now certain, and the stop string that matched."""
        self._held += self._decoder.decode(bytes([token_id]) if token_id < 256 else b"")
        for stop in self._stops:
            if (at := self._held.find(stop)) >= 0:
                text, self._held = self._held[:at], ""
                return text, stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def end(self, matched: bool) -> str:
        """What was held back, unless a stop string ended the text."""
        return "" if matched else self._held + self._decoder.decode(b"", final=True)

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
