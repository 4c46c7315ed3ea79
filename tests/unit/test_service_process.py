"""How the process of a service ends, shown by small services in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVING = """
import asyncio, threading, time
from common.service import run_service

async def serve(settings, stop):
    threading.Thread(target=time.sleep, args=(600,)).start()
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    print("serving", flush=True)
    await stop.wait()
    print("closed")

run_service("target", serve)
"""
LOADING = """
import asyncio, time
from common.service import load_unless_stopped, run_service

async def serve(settings, stop):
    print("loading", flush=True)
    await load_unless_stopped(stop, asyncio.to_thread(time.sleep, 600))
    print("loaded")

run_service("target", serve)
"""
INTERRUPTED_IMPORT = """
import os, signal, sys, types

class Stack(types.ModuleType):
    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGINT)
        return lambda: 0

sys.modules["services.supervisor.stack"] = Stack("stack")
from services.supervisor.__main__ import run
run()
"""


def stop_after_first_line(source: str, signum: signal.Signals) -> tuple[int, str]:
    """Exit status, and what was printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signum)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    return process.returncode, first + rest


def test_a_service_ends_once_it_has_closed_whatever_its_threads_still_do() -> None:
    assert stop_after_first_line(SERVING, signal.SIGTERM) == (0, "serving\nclosed\n")


def test_a_service_that_still_loads_ends_when_it_is_asked_to() -> None:
    assert stop_after_first_line(LOADING, signal.SIGINT) == (0, "loading\n")


def test_an_interrupted_start_of_the_stack_prints_no_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


def test_supervisor_and_gateway_load_no_torch() -> None:
    source = (
        "import sys, services.supervisor.stack, services.gateway.__main__; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, timeout=60, check=False).returncode == 0
