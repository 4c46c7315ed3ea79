"""Response bodies and stream chunks. A field that is UNSET is left out; None is written as null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET


class ChunkSpec(msgspec.Struct, frozen=True):
    """Extension: draft tokens verified and accepted for this chunk, and which of its ids were drafted."""

    drafted: int
    accepted: int
    from_draft: list[bool]


class SpeculativeDecoding(msgspec.Struct, frozen=True):
    """mean_acceptance_length: committed tokens per step, bonus included. draft_acceptance_rate: accepted by
    drafted tokens. acceptance_histogram[j]: steps that accepted j draft tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(msgspec.Struct, frozen=True):
    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: SpeculativeDecoding | None


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    spec: ChunkSpec | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: str
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    spec: ChunkSpec | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a text completion, whole or one chunk of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    spec: ChunkSpec | UnsetType = UNSET


Choice: TypeAlias = ChatChunkChoice | ChatChoice | TextChoice


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Envelope of every answer and chunk. seed: repeats the request when it is given again."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Status(msgspec.Struct, frozen=True):
    """draft: a drafter is running ahead; without one the text is the same, only slower."""

    status: str
    draft: bool
