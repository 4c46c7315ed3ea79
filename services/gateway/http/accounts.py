"""What a finished request used and how long it took."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from services.gateway.engine import Final, SpecStats
from services.gateway.http.objects import CachedTokens, RequestMetrics, SpeculativeDecoding, Usage


def usage_of(finals: Mapping[int, Final], group: int) -> Usage:
    """finals: by choice. A prompt with several choices (group of them) counts once."""
    firsts = [final for index, final in finals.items() if index % group == 0]
    prompt = sum(final.prompt_tokens for final in firsts)
    completion = sum(final.completion_tokens for final in finals.values())
    cached = sum(final.cached_tokens for final in firsts)
    return Usage(prompt, completion, prompt + completion, CachedTokens(cached))


def metrics_of(finals: Mapping[int, Final], wanted: bool) -> RequestMetrics | UnsetType | None:
    """The shape of vLLM's per-request metrics; null for a request of several choices."""
    if not wanted:
        return UNSET
    if len(finals) != 1:
        return None
    (final,) = finals.values()
    running_s = final.total_s - final.queue_s
    decode_s = final.total_s - final.first_token_s
    return RequestMetrics(
        time_to_first_token_ms=1e3 * final.first_token_s,
        generation_time_ms=1e3 * decode_s,
        queue_time_ms=1e3 * final.queue_s,
        mean_itl_ms=1e3 * decode_s / max(1, final.completion_tokens - 1),
        tokens_per_second=final.completion_tokens / running_s if running_s > 0 else 0.0,
        speculative_decoding=_speculation(final.spec),
    )


def _speculation(spec: SpecStats) -> SpeculativeDecoding | None:
    if spec.steps == 0 or not spec.histogram:
        return None
    return SpeculativeDecoding(
        mean_acceptance_length=1 + spec.accepted / spec.steps,
        draft_acceptance_rate=spec.accepted / spec.drafted if spec.drafted else 0.0,
        acceptance_histogram=list(spec.histogram),
        num_spec_steps=spec.steps,
        num_accepted_draft_tokens=spec.accepted,
        num_draft_tokens=spec.drafted,
        num_spec_tokens=len(spec.histogram) - 1,
    )
