"""What every service process does around its own work: settings, logging, signals, a parent that may die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

from common.actors.endpoint import TransportError
from common.actors.ipc import AddressError
from common.actors.supervisor import Escalation, RestartPolicy, Supervisor
from common.settings import Settings, SettingsError, load_settings

SUPERVISED_ENV = "PACELINE_SUPERVISED"
EXIT_SETTINGS = 2
"""Exit code of a process that can never start as it is configured: restarting it would not help."""


class StartupError(Exception):
    """The service cannot start as configured. One line: the thing, the value, the limit, the remedy."""


T = TypeVar("T")
ServiceMain = Callable[[Settings, asyncio.Event], Awaitable[None]]
"""Runs until the event is set, then closes what it opened."""


class StoppedEarly(Exception):
    """The process is asked to stop before it serves."""


def run_service(name: str, main: ServiceMain) -> None:
    """Entry of `python -m services.<name>`; exits the interpreter with the service's status."""
    try:
        settings = load_settings(f"python -m services.{name}", sys.argv[1:], os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_SETTINGS) from None
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(levelname).1s %(name)s: %(message)s",
        stream=sys.stdout,
        force=True,
    )
    try:
        uvloop.run(_supervised(main, settings))
    except StartupError as error:
        print(error, file=sys.stderr)
        raise SystemExit(EXIT_SETTINGS) from None


async def _supervised(main: ServiceMain, settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if os.environ.get(SUPERVISED_ENV):
        loop.add_reader(sys.stdin.fileno(), _stop_at_eof, loop, stop)
    with contextlib.suppress(StoppedEarly):
        await main(settings, stop)
    _end_process()


def _end_process() -> NoReturn:
    """Now that everything is closed. An interpreter that has loaded torch takes most of a second to take
    itself apart, longer beside others that do the same, and waits for threads whose work nobody needs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _stop_at_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()


async def load_unless_stopped(stop: asyncio.Event, loading: Coroutine[Any, Any, T]) -> T:
    """What loading gives. Raises StoppedEarly as soon as the process is asked to stop."""
    load = asyncio.create_task(loading)
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait([load, asked], return_when=asyncio.FIRST_COMPLETED)
    if not load.done():
        raise StoppedEarly
    asked.cancel()
    return load.result()


FATAL = RestartPolicy(max_failures=1)
"""For an actor whose state a restart could not bring back: the process ends and is started again."""

_CONFIGURATION_FAULTS = (StartupError, AddressError, TransportError)


async def wait_until_stopped(stop: asyncio.Event, actors: Supervisor) -> None:
    """Until the process is asked to stop. Raises StartupError when an actor failed for a fault of the
    configuration, Escalation when one failed for good for any other reason."""
    failed = asyncio.create_task(actors.escalated())
    asked = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([failed, asked], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    except Escalation as error:
        if isinstance(error.__cause__, _CONFIGURATION_FAULTS):
            raise StartupError(str(error.__cause__)) from error
        raise
    finally:
        failed.cancel()
        asked.cancel()
