"""One supervised process: started in its own session, its output prefixed, restarted with backoff."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from common.service import EXIT_SETTINGS, SUPERVISED_ENV

BACKOFF_FIRST_S = 0.25
BACKOFF_LIMIT_S = 8.0
FAILURES_LIMIT = 6
FAILURES_WINDOW_S = 60.0
_COLOURS = {"gateway": "36", "target": "32", "draft": "33"}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process of the stack: `python -m module` with these variables added to the environment."""

    name: str
    module: str
    environ: Mapping[str, str]


class Escalation(Exception):
    """A child that restarting does not help: the whole stack stops with this exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """Keeps one process running until `stop`."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Returns after `stop`; raises Escalation when the process keeps failing."""
        failures: list[float] = []
        while not self._stopping:
            code = await self._run_once()
            if self.is_stopping():
                return
            if code == EXIT_SETTINGS:
                raise Escalation(f"{self.spec.name} cannot start as configured", code)
            now = time.monotonic()
            failures = [*(at for at in failures if now - at < FAILURES_WINDOW_S), now]
            if len(failures) >= FAILURES_LIMIT:
                raise Escalation(
                    f"{self.spec.name} ended {len(failures)} times within {FAILURES_WINDOW_S:.0f} s", 1
                )
            pause_s = min(BACKOFF_FIRST_S * 2 ** (len(failures) - 1), BACKOFF_LIMIT_S)
            self._print(f"ended with status {code}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace; returns when the process is gone."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            self._print(f"did not end within {grace_s:g} s; killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.spec.module,
            env={**os.environ, **self.spec.environ, SUPERVISED_ENV: "1", "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None
        while line := await _read_line(process.stdout):
            self._print(line)
        return await process.wait()

    def _print(self, text: str) -> None:
        label = f"[{self.spec.name}]"
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            label = f"\x1b[{_COLOURS.get(self.spec.name, '0')}m{label}\x1b[0m"
        print(f"{label} {text}", flush=True)


async def _read_line(stream: asyncio.StreamReader) -> str:
    """The next non-empty line without its end; '' at the end of the stream. Over-long lines are cut."""
    while True:
        try:
            raw = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial.decode(errors="replace").rstrip()
        except asyncio.LimitOverrunError as error:
            raw = await stream.readexactly(error.consumed)
        if text := raw.decode(errors="replace").rstrip():
            return text
