"""`python -m services.gateway`: the fronts, and the core that drives the pair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from common.actors.supervisor import Supervisor
from common.cores import group_count
from common.identifiers import new_id
from common.memory.free import resident_bytes
from common.model.catalog import ResolvedModel, resolve_model
from common.model.tokenizer import Tokenizer, load_tokenizer
from common.service import FATAL, StartupError, load_unless_stopped, run_service, wait_until_stopped
from common.settings import Settings
from paceline import __version__
from services.gateway.adaptive_k import AdaptiveK
from services.gateway.coordinator import Coordinator
from services.gateway.core import GatewayActor, GatewayEngine
from services.gateway.http.app import create_app
from services.gateway.http.metrics import EngineGauges, GatewayMetrics, MeteredEngine
from services.gateway.http.server import BindError as HttpBindError
from services.gateway.http.server import serve_http
from services.gateway.http.settings import ExposedWithoutKey, HttpSettings, check_exposure
from services.gateway.options import CoordinatorOptions, FixedK, KController
from services.gateway.zmq.front import BindError as ZmqBindError
from services.gateway.zmq.front import ZmqFront
from services.gateway.zmq.settings import AddressRefused, ZmqSettings

log = logging.getLogger("gateway")

MAX_AUTO_K = 8
"""Pages for so many draft tokens are reserved for every slot."""
FIRST_AUTO_K = MAX_AUTO_K
"""What a smaller k than those measured would accept is overestimated for trees, which shows once it is tried;
a larger one is underestimated, and might never be tried. So the search begins at the top."""
DRAIN_S = 0.0
"""Open streams end at once with an error frame: most would not end within the grace of a stop."""


def load(settings: Settings) -> tuple[ResolvedModel, Tokenizer]:
    try:
        resolved = resolve_model(settings.model)
        return resolved, load_tokenizer(resolved.path)
    except (ValueError, OSError) as error:
        raise StartupError(f"model {settings.model!r} cannot be served: {error}") from error


def coordinator_options(settings: Settings, tokenizer: Tokenizer) -> CoordinatorOptions:
    return CoordinatorOptions(
        max_model_len=settings.max_model_len,
        kv_memory_bytes=settings.kv_memory_bytes,
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        chunk_rows=settings.prefill_chunk,
        max_nodes=max_k(settings) + 1,
        groups=group_count(settings, os.cpu_count() or 1),
        tokenizer=tokenizer.fingerprint,
    )


def max_k(settings: Settings) -> int:
    return MAX_AUTO_K if settings.k == "auto" else settings.k


def k_controller(settings: Settings) -> KController:
    return AdaptiveK(MAX_AUTO_K, FIRST_AUTO_K) if settings.k == "auto" else FixedK(settings.k)


def gauges(coordinator: Coordinator, controller: KController, pages: int) -> EngineGauges:
    requests = coordinator.requests
    return EngineGauges(
        running=len(requests.live),
        waiting=len(requests.waiting),
        pages=pages,
        free_pages=coordinator.free_pages,
        retiring_pages=coordinator.retiring_pages,
        k=controller.belief(),
        groups=len(coordinator.groups),
        usage=coordinator.usage,
        resident_bytes={**coordinator.resident_bytes, "gateway": resident_bytes()},
    )


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    api_keys = (settings.api_key,) if settings.api_key else ()
    try:
        check_exposure(settings.host, api_keys)
    except ExposedWithoutKey as error:
        raise StartupError(str(error)) from error
    resolved, tokenizer = await load_unless_stopped(stop, asyncio.to_thread(load, settings))
    controller = k_controller(settings)
    coordinator = Coordinator(coordinator_options(settings, tokenizer), controller, new_id)
    core = GatewayEngine(resolved.name, settings.max_model_len, tokenizer, settings.queue_limit)
    metrics = GatewayMetrics(lambda: gauges(coordinator, controller, core.pages))
    engine = MeteredEngine(core, metrics)
    app = create_app(engine, tokenizer, HttpSettings(__version__, api_keys), metrics)
    zmq_address = f"tcp://{settings.zmq_host}:{settings.zmq_port}"
    try:
        zmq_front = ZmqFront(engine, tokenizer, zmq_address, ZmqSettings())
        async with Supervisor() as actors, contextlib.AsyncExitStack() as fronts:
            # A Coordinator that fails has lost its requests: the process starts over with a new epoch.
            actors.spawn(
                "gateway",
                lambda: GatewayActor(coordinator, core, settings.run_dir),
                mailbox_capacity=16 * settings.queue_limit + 1024,
                policy=FATAL,
            )
            await zmq_front.start()
            fronts.push_async_callback(zmq_front.close)
            server = await serve_http(app, settings.host, settings.port)
            fronts.push_async_callback(server.shutdown, DRAIN_S)
            log.info("HTTP on http://%s:%d, ZeroMQ on %s", server.host, server.port, zmq_address)
            log.info("groups of requests: %d", len(coordinator.groups))
            await wait_until_stopped(stop, actors)
            core.close()
    except (HttpBindError, ZmqBindError, AddressRefused) as error:
        raise StartupError(str(error)) from error


if __name__ == "__main__":
    run_service("gateway", serve)
