"""A whole stack as a user starts it: `paceline serve` in a process of its own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 120.0
STOP_S = 10.0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Stack:
    """shm_dir: the stack's own shared-memory directory, so that a test sees what is left in it."""

    def __init__(self, *flags: str) -> None:
        self.port, self.zmq_port = free_ports(2)
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-e2e-"))
        self.shm_dir = Path(tempfile.mkdtemp(prefix="paceline-e2e-", dir="/dev/shm"))
        self.log_path = self.folder / "log"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
        for kept in ("PACELINE_HOME",):
            if kept in os.environ:
                environ[kept] = os.environ[kept]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "paceline.cli", "serve"),
                    *("--port", str(self.port), "--zmq-port", str(self.zmq_port)),
                    *("--shm-dir", str(self.shm_dir)),
                    *("--kv-memory", "256MiB", "--max-model-len", "2048"),
                    *flags,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environ, "TMPDIR": str(self.folder)},
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.zmq_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, *, draft: bool) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the stack ended with {self.process.returncode}:\n{self.log}")
            if self._is_ready() and (not draft or "draft joined" in self.log):
                return
            time.sleep(0.1)
        raise AssertionError(f"the stack was not ready in {START_S:.0f} s:\n{self.log}")

    def _is_ready(self) -> bool:
        try:
            return self.request("/ready")[0] == 200
        except OSError:
            return False

    def request(
        self, path: str, body: Any = None, *, raw: bytes | None = None, timeout_s: float = 120.0
    ) -> tuple[int, Any]:
        """Status and JSON (or text) of one HTTP exchange."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def metric(self, name: str) -> float:
        """Sum of a series over its labels."""
        _, text = self.request("/metrics")
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in str(text).splitlines()
            if line.startswith((f"paceline:{name} ", f"paceline:{name}{{"))
        ]
        assert values, f"no series {name} in\n{text}"
        return sum(values)

    def wait_metric(self, name: str, value: float, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {timeout_s} s"
            time.sleep(0.05)

    def wait_pool_full(self) -> None:
        """Every page is back and nothing runs or waits."""
        self.wait_metric("num_requests_running", 0)
        self.wait_metric("num_requests_waiting", 0)
        self.wait_metric("kv_pages_retiring", 0)
        self.wait_metric("kv_pages_free", self.metric("kv_pages"))

    def pid_of(self, service: str) -> int:
        """Process id of a running service of this stack."""
        children = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for line in children.splitlines():
            pid, _, args = line.strip().partition(" ")
            if args.endswith(f"-m services.{service}"):
                return int(pid)
        raise AssertionError(f"no {service} among\n{children}")

    def stop(self) -> float:
        """SIGTERM, and the seconds until everything was gone."""
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)
        return time.monotonic() - started

    def left_behind(self) -> list[str]:
        """Files that a stopped stack has left in its shared-memory and temporary directories."""
        left = [str(path) for path in self.shm_dir.iterdir()]
        return left + [str(path) for path in self.folder.iterdir() if path != self.log_path]


@contextlib.contextmanager
def running(*flags: str, draft: bool) -> Iterator[Stack]:
    """A ready stack. draft: wait for the draft too. Prints the stack's log if the block fails."""
    stack = Stack(*flags)
    try:
        stack.wait_ready(draft=draft)
        yield stack
    except BaseException:
        print(stack.log)
        raise
    finally:
        try:
            stack.stop()
        except subprocess.TimeoutExpired:
            os.killpg(stack.process.pid, signal.SIGKILL)
            raise
        finally:
            for path in (*stack.shm_dir.iterdir(),):
                path.unlink()
            stack.shm_dir.rmdir()
            shutil.rmtree(stack.folder, ignore_errors=True)
