"""`python -m services.draft`: load the drafter, then draft for whatever pair a gateway configures."""

from __future__ import annotations

import asyncio
import logging
import os

import torch

from common.actors.device import DeviceThread
from common.actors.supervisor import Supervisor
from common.cores import draft_threads
from common.identifiers import new_id
from common.memory.free import resident_bytes
from common.messages.lifecycle import DraftHello
from common.messages.stamp import PROTOCOL_VERSION
from common.service import FATAL, StartupError, load_unless_stopped, run_service, wait_until_stopped
from common.settings import Settings
from services.draft.actor import DraftActor
from services.draft.drafters.load import load_drafter
from services.draft.link import DraftLink
from services.draft.options import DraftOptions

log = logging.getLogger("draft")


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    if settings.drafter == "none":
        raise StartupError("drafter none: there is nothing for this service to do; do not start it")
    torch.set_num_threads(draft_threads(settings, os.cpu_count() or 1))
    device = DeviceThread("draft-device")
    drafter = await load_unless_stopped(stop, device.run(lambda: load_drafter(settings)))
    log.info("drafter %s is ready, %.0f MiB resident", drafter.name, resident_bytes() / (1 << 20))
    profile = DraftHello(
        incarnation=0,
        protocol=PROTOCOL_VERSION,
        drafter=drafter.name,
        vocab_size=drafter.vocab_size,
        tokenizer=drafter.tokenizer,
        device="cpu",
        kv_bytes_per_position=drafter.kv_bytes_per_position,
        max_k=drafter.max_k,
        capture=list(drafter.capture),
        hidden_row_bytes=drafter.hidden_row_bytes,
    )
    async with Supervisor() as actors:
        actors.spawn(
            "draft",
            lambda: DraftActor(DraftLink(profile, DraftOptions(), new_id), drafter, device, settings),
            policy=FATAL,
        )
        await wait_until_stopped(stop, actors)


if __name__ == "__main__":
    run_service("draft", serve)
