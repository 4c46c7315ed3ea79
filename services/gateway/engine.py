"""What a front (HTTP, ZeroMQ) asks of the gateway's core, and what it gets back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from common.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One choice to generate.

    prompt_ids: 1 … max_model_len − 1 ids. max_tokens: at most this many new tokens (already clipped to the
    context). stop: strings that end the text, none empty; the matched one is cut off. ignore_eos: go on past
    EOS. priority: lower runs first.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one committed step added. text may be empty while a possible stop string or half a character is
    held back. from_draft: for each id, whether it was an accepted draft token. drafted, accepted: of this
    step."""

    token_ids: tuple[int, ...]
    text: str
    from_draft: tuple[bool, ...]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SpecStats:
    """steps: target steps that sampled for this request. drafted, accepted: draft tokens over all steps.
    histogram[j]: steps that accepted exactly j draft tokens."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Final:
    """finish_reason: stop | length | abort | error. stop_reason: the stop string or stop token id that
    matched, None for EOS. error: message when finish_reason is error."""

    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float
    spec: SpecStats = field(default_factory=SpecStats)
    error: str = ""


class AdmissionError(Exception):
    """code: queue_full | shutting_down | not_ready | never_fits."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Generation(Protocol):
    """One running request: iterate over its chunks (one per committed step), then read `final`."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    @property
    def final(self) -> Final:
        """Set once iteration has ended."""
        ...

    def cancel(self) -> None:
        """Idempotent; iteration then ends with finish_reason abort."""
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the fronts tell about the served model."""

    model: str
    max_model_len: int
    vocab_size: int
    drafter: str
    created: int


class Engine(Protocol):
    """The gateway's core as the fronts see it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def ready(self) -> bool:
        """The target is configured and requests are taken."""
        ...

    @property
    def draft_ready(self) -> bool: ...

    def submit(self, spec: GenerationSpec) -> Generation:
        """Raises AdmissionError; nothing has happened then."""
        ...
