"""The gateway's core: the Coordinator in an actor, and the engine that the fronts use."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import replace

from common.actors.actor import Actor, ActorContext, ActorRef
from common.actors.errors import Undeliverable
from common.actors.transport import RouterEndpoint
from common.messages.conversations import ToGateway, peer_address
from common.messages.lifecycle import (
    Configure,
    DraftHello,
    Heartbeat,
    Message,
    StartOver,
    TargetHello,
)
from common.messages.lifecycle import Refused as RefusedMessage
from common.model.tokenizer import Tokenizer
from services.gateway import events as ev
from services.gateway.coordinator import Coordinator
from services.gateway.engine import AdmissionError, EngineInfo, Generation, GenerationSpec
from services.gateway.running import RunningGeneration
from services.gateway.text import TextStream

log = logging.getLogger("gateway")

KNOWN_PEERS = 64
"""Services that are remembered by incarnation."""
NO_DRAFTER = "none"


class GatewayEngine:
    """Implements `Engine`. Event loop only. pages: that the KV pool can give out, 0 without a target."""

    def __init__(self, model: str, max_model_len: int, tokenizer: Tokenizer, queue_limit: int) -> None:
        self._info = EngineInfo(model, max_model_len, tokenizer.vocab_size, NO_DRAFTER, int(time.time()))
        self._tokenizer = tokenizer
        self._queue_limit = queue_limit
        self._ids = itertools.count(1)
        self._core: ActorRef[ev.Event] | None = None
        self._target_ready = False
        self._closing = False
        self.pages = 0
        self.generations: dict[int, RunningGeneration] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def ready(self) -> bool:
        return self._target_ready and not self._closing

    @property
    def draft_ready(self) -> bool:
        return self._info.drafter != NO_DRAFTER

    def submit(self, spec: GenerationSpec) -> Generation:
        if self._closing:
            raise AdmissionError("shutting_down", "The server is shutting down.")
        if not self._target_ready or self._core is None:
            raise AdmissionError("not_ready", "The model is not loaded yet; ask again in a few seconds.")
        if len(self.generations) >= self._queue_limit:
            raise AdmissionError(
                "queue_full", f"{self._queue_limit} requests are running or waiting, which is the limit."
            )
        request = next(self._ids)
        core = self._core
        generation = RunningGeneration(
            spec,
            TextStream(
                self._tokenizer,
                stop=spec.stop,
                stop_token_ids=spec.stop_token_ids,
                eos_ids=self._tokenizer.eos_ids,
                ignore_eos=spec.ignore_eos,
                max_tokens=spec.max_tokens,
            ),
            asyncio.get_running_loop().time(),
            lambda: _post(core, ev.Abort(request)),
        )
        try:
            core.tell(
                ev.Submit(request, spec.prompt_ids, spec.sampling, spec.max_tokens, generation, spec.priority)
            )
        except Undeliverable as error:
            raise AdmissionError("queue_full", f"The gateway is overloaded: {error}") from error
        self.generations[request] = generation
        return generation

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closing = True

    def bound_to(self, core: ActorRef[ev.Event]) -> None:
        self._core = core

    def target_ready(self, event: ev.TargetReady) -> None:
        self._target_ready = True
        self.pages = event.pages - 1
        self._info = replace(self._info, max_model_len=event.max_model_len)

    def target_lost(self) -> None:
        self._target_ready = False
        self.pages = 0

    def drafter_is(self, name: str) -> None:
        self._info = replace(self._info, drafter=name)


def _post(core: ActorRef[ev.Event], event: ev.Event) -> None:
    """An abort is owed: it frees what its request holds, so a full mailbox must not refuse it."""
    core.post(event)


class GatewayActor(Actor[ev.Event]):
    """Carries the effects of the Coordinator out."""

    def __init__(self, coordinator: Coordinator, engine: GatewayEngine, run_dir: str) -> None:
        self._coordinator = coordinator
        self._engine = engine
        self._run_dir = run_dir
        self._routes: dict[int, str] = {}
        self._sent_to: dict[ev.Peer, str] = {}

    async def started(self, context: ActorContext[ev.Event]) -> None:
        self._ref = context.ref
        self._timers = context.timers
        self._services: RouterEndpoint[Message] = RouterEndpoint(
            peer_address(self._run_dir, "gateway"),
            accepts=ToGateway,
            on_message=self._hear,
            on_peer_lost=self._lose,
        )
        self._engine.bound_to(context.ref)
        self._step(ev.Start())

    async def receive(self, message: ev.Event) -> None:
        self._step(message)

    async def stopped(self) -> None:
        self._services.close()

    def _hear(self, peer: str, message: Message) -> None:
        if isinstance(message, TargetHello | DraftHello):
            self._routes.pop(message.incarnation, None)
            self._routes[message.incarnation] = peer
            while len(self._routes) > KNOWN_PEERS:
                del self._routes[next(iter(self._routes))]
        self._ref.tell(ev.Received("target" if peer.startswith("target-") else "draft", message))

    def _lose(self, route: str) -> None:
        """A send found the peer gone. One that is no longer sent to is of no concern."""
        for peer, current in self._sent_to.items():
            if current == route:
                self._ref.post(ev.PeerLost(peer, "its socket is gone"))

    def _step(self, event: ev.Event) -> None:
        now = asyncio.get_running_loop().time()
        effects = self._coordinator.handle(event, now)
        # The services wait for what is sent to them; clients can hear while those work.
        for effect in sorted(effects, key=lambda one: not isinstance(one, ev.Send)):
            self._carry_out(effect, now)

    def _carry_out(self, effect: ev.Effect, now: float) -> None:
        match effect:
            case ev.Send(peer, message):
                if route := self._routes.get(_addressee(peer, message)):
                    if not isinstance(message, RefusedMessage | StartOver):
                        self._sent_to[peer] = route
                    self._services.send(route, message)
            case ev.SetTimer(name, at):
                self._timers.set(name, at - now, ev.TimerFired(name))
            case ev.Emit():
                self._engine.generations[effect.request].emitted(effect, now)
            case ev.Finished() | ev.Failed():
                self._engine.generations.pop(effect.request).ended(effect, now)
            case ev.TargetReady():
                log.info("target ready: %d pages, %d tokens of context", effect.pages, effect.max_model_len)
                self._engine.target_ready(effect)
            case ev.TargetLost(reason):
                log.warning("no target: %s", reason)
                self._engine.target_lost()
            case ev.DraftJoined(drafter):
                log.info("draft joined: %s", drafter)
                self._engine.drafter_is(drafter)
            case ev.DraftLost(reason):
                log.warning("no draft: %s", reason)
                self._engine.drafter_is(NO_DRAFTER)
            case ev.PeerRefused(service, reason):
                log.error("%s refused: %s", service, reason)


def _addressee(peer: ev.Peer, message: Message) -> int:
    """The incarnation that a message is for."""
    match message:
        case Heartbeat() | RefusedMessage() | StartOver():
            return message.incarnation
        case Configure():
            return message.target
        case _:
            stamp = message.stamp  # type: ignore[attr-defined]
            return int(stamp.target if peer == "target" else stamp.draft)
