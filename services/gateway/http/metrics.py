"""Prometheus series of the gateway. Names are vLLM's with our prefix, so that dashboards port by sed.

`MeteredEngine` counts every generation once, whichever front asked for it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.engine import (
    AdmissionError,
    Chunk,
    Engine,
    EngineInfo,
    Final,
    Generation,
    GenerationSpec,
)
from services.gateway.options import KBelief
from services.gateway.usage import WINDOW_S, Usage

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "paceline:"
MAX_POSITIONS = 16
"""Draft positions that get a series of their own; deeper ones share the last."""

# vLLM's, so that its dashboards and recorded quantiles compare.
# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)
_BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)
# fmt: on
_FINISH_REASONS = ("stop", "length", "abort", "error")
_REFUSALS = ("queue_full", "shutting_down", "not_ready", "never_fits")


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What the core holds at this moment. pages: of the KV pool, without the one that is never given out.
    groups: of requests that step by turns. resident_bytes: by process."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    retiring_pages: int
    k: KBelief
    groups: int
    usage: Usage
    resident_bytes: Mapping[str, int]


class GatewayMetrics:
    """gauges: asked at each scrape; None leaves those series out."""

    def __init__(self, gauges: Callable[[], EngineGauges] | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(gauges))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self._drafts = counter("spec_decode_num_drafts", "Target steps that verified draft tokens.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", "position"
        )
        self._accepted_at = [per_position.labels(position=str(i)) for i in range(MAX_POSITIONS)]
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = counter("generation_tokens", "Tokens committed.")
        finished = counter("request_success", "Generations that ended, by reason.", "finished_reason")
        self._finished = {reason: finished.labels(reason) for reason in _FINISH_REASONS}
        refused = counter("request_refused", "Generations that were not admitted, by reason.", "reason")
        self._refused = {reason: refused.labels(reason) for reason in _REFUSALS}
        self._http = counter("http_requests", "HTTP responses.", "path", "status")
        self._first_token = histogram(
            "time_to_first_token_seconds", "Submission to first token.", _FIRST_TOKEN_S
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Time between committed steps of a generation.", _BETWEEN_TOKENS_S
        )
        self._request = histogram("e2e_request_latency_seconds", "Submission to last token.", _REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "Submission to start.", _REQUEST_S)

    def observe_chunk(self, chunk: Chunk, since_last_s: float | None) -> None:
        """since_last_s: time since the generation's chunk before; None for its first."""
        if since_last_s is not None:
            self._between.observe(since_last_s)
        self._generation_tokens.inc(len(chunk.token_ids))
        if chunk.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(chunk.drafted)
            self._accepted.inc(chunk.accepted)
            for position in range(chunk.accepted):
                self._accepted_at[min(position, MAX_POSITIONS - 1)].inc()

    def observe_final(self, final: Final) -> None:
        self._finished[final.finish_reason].inc()
        self._prompt_tokens.inc(final.prompt_tokens)
        self._cached_tokens.inc(final.cached_tokens)
        self._queue.observe(final.queue_s)
        self._request.observe(final.total_s)
        if final.completion_tokens:
            self._first_token.observe(final.first_token_s)

    def observe_refusal(self, code: str) -> None:
        self._refused[code].inc()

    def observe_response(self, path: str, status: int) -> None:
        """path: of a route, never what a client wrote."""
        self._http.labels(path, str(status)).inc()

    def exposition(self) -> bytes:
        """The body of /metrics, of type CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, gauges: Callable[[], EngineGauges] | None) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        if self._gauges is None:
            return
        now = self._gauges()
        held = now.pages - now.free_pages
        for name, text, value in (
            ("num_requests_running", "Generations that hold a slot.", now.running),
            ("num_requests_waiting", "Generations that wait for a slot.", now.waiting),
            ("num_groups", "Groups of requests that step by turns.", now.groups),
            ("kv_pages", "Pages of the KV pool.", now.pages),
            (
                "kv_pages_free",
                "Pages that can be given out, those that only the prefix cache holds included.",
                now.free_pages,
            ),
            ("kv_pages_retiring", "Pages that wait for the draft's acknowledgement.", now.retiring_pages),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool in use, 0 to 1.",
                held / now.pages if now.pages else 0.0,
            ),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield from _k_gauges(now.k)
        yield from _usage(now.usage)
        yield _resident(now.resident_bytes)


def _usage(usage: Usage) -> Iterator[Metric]:
    busy = CounterMetricFamily(
        PREFIX + "service_busy_seconds", "Time that the service's device has worked.", labels=("service",)
    )
    busy.add_metric(("target",), usage.target_busy_s)
    busy.add_metric(("draft",), usage.draft_busy_s)
    yield busy
    idle = GaugeMetricFamily(
        PREFIX + "service_idle_ratio",
        f"Share of the last {WINDOW_S:g} s in which the service's device had no work, 0 to 1.",
        labels=("service",),
    )
    for service, ratio in usage.idle_ratios().items():
        idle.add_metric((service,), ratio)
    yield idle
    hidden = CounterMetricFamily(
        PREFIX + "spec_decode_hidden_rounds",
        "Rounds whose hidden rows the draft was to read, by whether it had consumed the ones before.",
        labels=("outcome",),
    )
    for outcome in ("rows", "no_rows"):
        hidden.add_metric((outcome,), usage.hidden_rounds[outcome])
    yield hidden
    yield CounterMetricFamily(
        PREFIX + "round_seconds", "Time in which a round was outstanding.", value=usage.rounds_s
    )


def _resident(sizes: Mapping[str, int]) -> GaugeMetricFamily:
    resident = GaugeMetricFamily(
        PREFIX + "process_resident_memory_bytes",
        "Memory of a process, what it shares with others included.",
        labels=("service",),
    )
    for service, size in sizes.items():
        resident.add_metric((service,), size)
    return resident


def _k_gauges(belief: KBelief) -> Iterator[GaugeMetricFamily]:
    yield GaugeMetricFamily(PREFIX + "spec_decode_k", "Draft tokens asked for in a round.", value=belief.k)
    for name, text, label, values in (
        (
            "spec_decode_expected_acceptance",
            "Expected share of steps that accept a draft token at this position.",
            "position",
            belief.accepted,
        ),
        ("spec_decode_expected_round_seconds", "Expected time of a round.", "k", belief.round_s),
        (
            "spec_decode_expected_tokens_per_second",
            "Tokens per second that a k promises.",
            "k",
            belief.tokens_per_s,
        ),
    ):
        family = GaugeMetricFamily(PREFIX + name, text, labels=(label,))
        for at, value in enumerate(values):
            family.add_metric((str(at),), value)
        yield family


class MeteredEngine:
    """An Engine that counts what passes through it."""

    def __init__(self, engine: Engine, metrics: GatewayMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def ready(self) -> bool:
        return self._engine.ready

    @property
    def draft_ready(self) -> bool:
        return self._engine.draft_ready

    def submit(self, spec: GenerationSpec) -> Generation:
        try:
            return _MeteredGeneration(self._engine.submit(spec), self._metrics)
        except AdmissionError as error:
            self._metrics.observe_refusal(error.code)
            raise


class _MeteredGeneration:
    def __init__(self, generation: Generation, metrics: GatewayMetrics) -> None:
        self._generation = generation
        self._metrics = metrics

    @property
    def final(self) -> Final:
        return self._generation.final

    def cancel(self) -> None:
        self._generation.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        last_s: float | None = None
        async for chunk in self._generation:
            now_s = time.monotonic()
            self._metrics.observe_chunk(chunk, None if last_s is None else now_s - last_s)
            last_s = now_s
            yield chunk
        self._metrics.observe_final(self._generation.final)
