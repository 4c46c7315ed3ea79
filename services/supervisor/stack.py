"""`paceline serve`: start target, draft and gateway, keep them running, stop them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from common.cores import draft_threads, target_threads
from common.memory.cleanup import remove_dead_arenas
from common.model.catalog import ModelNotFound, resolve_model
from common.settings import Settings, SettingsError, check_shm_dir, load_settings, to_environ
from services.supervisor.children import Child, ChildSpec, Escalation
from services.supervisor.run_dir import run_directory

GATEWAY_GRACE_S = 2.5
"""The gateway ends open streams first, so that clients hear why; the engines follow."""
ENGINE_GRACE_S = 1.5


def child_specs(settings: Settings) -> list[ChildSpec]:
    """Start order: the target takes longest."""
    cores = os.cpu_count() or 1
    threads = {
        "target": target_threads(settings, cores),
        "draft": draft_threads(settings, cores),
        "gateway": 1,
    }
    names = ["target", "draft", "gateway"] if settings.drafter != "none" else ["target", "gateway"]
    return [
        ChildSpec(
            name,
            f"services.{name}",
            {
                **to_environ(settings),
                "OMP_NUM_THREADS": str(threads[name]),
                "MKL_NUM_THREADS": str(threads[name]),
                # A thread of torch's that spins when it is done takes the core that a kernel's thread needs.
                "OMP_WAIT_POLICY": "passive",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        for name in names
    ]


async def supervise(settings: Settings) -> int:
    """Run the stack until a signal or an escalation; the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.set)
    children = {spec.name: Child(spec) for spec in child_specs(settings)}
    running: list[asyncio.Task[Any]] = [asyncio.create_task(child.run()) for child in children.values()]
    stopped: asyncio.Task[Any] = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
    await children["gateway"].stop(GATEWAY_GRACE_S)
    await asyncio.gather(*(child.stop(ENGINE_GRACE_S) for child in children.values()))
    stopped.cancel()
    for task in running:
        if task not in done:
            task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    code = 0
    for task in done - {stopped}:
        error = task.exception()
        if isinstance(error, Escalation):
            print(f"paceline: {error}; stopping", file=sys.stderr)
            code = error.code
        elif error is not None:
            raise error
    return code


def main() -> int:
    try:
        settings = load_settings("paceline serve", sys.argv[1:], os.environ)
        check_shm_dir(settings)
        resolve_model(settings.model)
    except (SettingsError, ModelNotFound) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    with run_directory(settings.run_dir) as run_dir:
        try:
            return asyncio.run(supervise(msgspec.structs.replace(settings, run_dir=str(run_dir))))
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            remove_dead_arenas(Path(settings.shm_dir))
