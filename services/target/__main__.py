"""`python -m services.target`: load the model, then serve whatever gateway configures this process."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.actors.device import DeviceThread
from common.actors.supervisor import Supervisor
from common.attention.kv_cache import kv_bytes_per_position
from common.cores import target_threads
from common.graphs.steps import CapturedSteps
from common.identifiers import new_id
from common.memory.cleanup import remove_dead_arenas
from common.memory.free import free_in_directory, free_memory, resident_bytes
from common.messages.lifecycle import TargetHello
from common.messages.stamp import PROTOCOL_VERSION
from common.model.catalog import ResolvedModel, resolve_model
from common.model.llama import LlamaModel
from common.model.load import load_model, open_checkpoint
from common.model.plan import cpu_plan
from common.model.plan_cache import changes_since_last_start, plan_file
from common.model.tokenizer import Tokenizer, load_tokenizer
from common.service import FATAL, StartupError, load_unless_stopped, run_service, wait_until_stopped
from common.settings import Settings, SettingsError, check_shm_dir
from services.target.actor import TargetActor
from services.target.capacity import TooLittleMemory, kv_room
from services.target.link import TargetLink
from services.target.options import TargetOptions
from services.target.runner import TargetRunner

log = logging.getLogger("target")

MAX_ROWS = 1024
"""Token rows of one forward: up to here every kernel's rows were shown to be independent of each other."""
WARM_ROWS = 256
"""Steps up to this size are gone through once at start."""
PROGRESS_EVERY_S = 2.0


def load(settings: Settings) -> tuple[LlamaModel, Tokenizer, ResolvedModel]:
    """Raises StartupError for a model that cannot be served."""
    started = logged = time.monotonic()

    def progress(doing: str) -> Callable[[int, int], None]:
        def told(done: int, of: int) -> None:
            nonlocal logged
            if time.monotonic() - logged > PROGRESS_EVERY_S:
                logged = time.monotonic()
                log.info("%s: %d of %d", doing, done, of)

        return told

    try:
        resolved = resolve_model(settings.model)
        tokenizer = load_tokenizer(resolved.path)
        config = open_checkpoint(resolved.path).config
        positions = min(settings.max_model_len, config.max_context)
        model = load_model(
            resolved.path,
            dtype=torch.bfloat16,
            max_positions=positions,
            weights=settings.weights,
            progress=progress(f"loading layers of {resolved.name}"),
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise StartupError(f"model {settings.model!r} cannot be served: {error}") from error
    if tokenizer.vocab_size > config.vocab_size:
        raise StartupError(
            f"model {settings.model!r}: the tokenizer has {tokenizer.vocab_size} ids, "
            f"the model {config.vocab_size}; they do not belong together"
        )
    if isinstance(model.steps, CapturedSteps):
        model.steps.warm(WARM_ROWS, progress("preparing step sizes"))
    log.info(
        "loaded %s in %.1f s, %.0f MiB resident",
        resolved.name,
        time.monotonic() - started,
        resident_bytes() / (1 << 20),
    )
    return model, tokenizer, resolved


def kv_positions(settings: Settings, kv_bytes: int, max_positions: int) -> int:
    """0 where the settings say how much memory. Raises StartupError."""
    if settings.kv_memory_bytes is not None:
        return 0
    try:
        shared_bytes = free_in_directory(Path(settings.shm_dir))
        room = kv_room(settings, kv_bytes, max_positions, free_memory(), shared_bytes)
    except TooLittleMemory as error:
        raise StartupError(str(error)) from error
    log.info("KV pool: %s", room.why)
    return room.positions


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    torch.set_num_threads(target_threads(settings, os.cpu_count() or 1))
    try:
        check_shm_dir(settings)
    except SettingsError as error:
        raise StartupError(str(error)) from error
    remove_dead_arenas(Path(settings.shm_dir))
    device = DeviceThread("target-device")
    model, tokenizer, resolved = await load_unless_stopped(stop, device.run(lambda: load(settings)))
    plan = cpu_plan(resolved.path, model)
    for change in changes_since_last_start(plan_file(settings.model, settings.weights), plan):
        log.warning("texts may differ from those of the last start; %s", change)
    kv_bytes = kv_bytes_per_position(model.config, model.dtype)
    profile = TargetHello(
        incarnation=0,
        protocol=PROTOCOL_VERSION,
        model=resolved.name,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.fingerprint,
        plan=plan.fingerprint,
        device="cpu",
        kv_bytes_per_position=kv_bytes,
        max_context=model.max_positions,
        max_rows=MAX_ROWS,
        kv_positions=kv_positions(settings, kv_bytes, model.max_positions),
    )
    runner = TargetRunner(model, tokenizer.vocab_size)
    options = TargetOptions(join_s=settings.draft_wait_s)
    async with Supervisor() as actors:
        actors.spawn(
            "target",
            lambda: TargetActor(TargetLink(profile, options, new_id), runner, device, settings, MAX_ROWS),
            policy=FATAL,
        )
        await wait_until_stopped(stop, actors)


if __name__ == "__main__":
    run_service("target", serve)
