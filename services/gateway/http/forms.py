"""How a choice is written: as a chat message or as a text, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import UNSET, UnsetType

from services.gateway.http.fanout import Delta
from services.gateway.http.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    ChunkSpec,
    Completion,
    RequestMetrics,
    TextChoice,
    Usage,
)
from services.gateway.http.schemas import GenerationRequest


@dataclass(frozen=True, slots=True)
class Wants:
    """What a request asked to be told beyond the text."""

    usage: bool
    running_usage: bool
    token_ids: bool
    spec: bool
    metrics: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> Wants:
        options = request.stream_options
        return cls(
            usage=options is not None and options.include_usage is True,
            running_usage=options is not None and options.continuous_usage_stats is True,
            token_ids=request.return_token_ids is True,
            spec=request.paceline_spec is True,
            metrics=request.paceline_metrics is True,
        )


@dataclass(frozen=True, slots=True)
class Extras:
    """What a choice tells beyond OpenAI's fields: UNSET where they were not asked for or do not apply."""

    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    spec: ChunkSpec | UnsetType = UNSET

    @classmethod
    def of(cls, delta: Delta, wants: Wants) -> Extras:
        return cls(
            token_ids=delta.token_ids if wants.token_ids else UNSET,
            spec=ChunkSpec(delta.drafted, delta.accepted, delta.from_draft) if wants.spec else UNSET,
            stop_reason=delta.final.stop_reason if delta.final else UNSET,
        )


class Form(ABC):
    """One request's answer: what all its chunks have in common. seed: the request's, before mixing.

    prompt_tokens: by choice. group: choices per prompt; choice i belongs to prompt i // group.
    """

    id_prefix: ClassVar[str]
    whole_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, model: str, seed: int, prompt_tokens: Sequence[int], group: int, wants: Wants) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.seed = seed
        self.choices = len(prompt_tokens)
        self.prompt_tokens = prompt_tokens
        self.group = group
        self.wants = wants

    @abstractmethod
    def opening(self, index: int) -> Choice | None:
        """What a stream says of a choice before its first text."""

    @abstractmethod
    def piece(self, index: int, text: str, extras: Extras) -> Choice: ...

    @abstractmethod
    def ending(self, index: int, finish_reason: str, extras: Extras) -> Choice: ...

    @abstractmethod
    def whole(self, index: int, text: str, finish_reason: str, extras: Extras) -> Choice: ...

    def chunk(
        self,
        choices: Sequence[Choice],
        usage: Usage | UnsetType | None,
        *,
        seed: int | UnsetType = UNSET,
        metrics: RequestMetrics | UnsetType | None = UNSET,
    ) -> Completion:
        return Completion(
            id=self.id,
            object=self.chunk_name,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            seed=seed,
            metrics=metrics,
        )

    def answer(
        self, choices: Sequence[Choice], usage: Usage, metrics: RequestMetrics | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.id,
            object=self.whole_name,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            seed=self.seed,
            metrics=metrics,
        )


class ChatForm(Form):
    id_prefix = "chatcmpl"
    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def piece(self, index: int, text: str, extras: Extras) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index, delta=ChatDelta(content=text), token_ids=extras.token_ids, spec=extras.spec
        )

    def ending(self, index: int, finish_reason: str, extras: Extras) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index, delta=ChatDelta(), finish_reason=finish_reason, stop_reason=extras.stop_reason
        )

    def whole(self, index: int, text: str, finish_reason: str, extras: Extras) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=text),
            finish_reason=finish_reason,
            stop_reason=extras.stop_reason,
            token_ids=extras.token_ids,
            spec=extras.spec,
        )


class TextForm(Form):
    id_prefix = "cmpl"
    whole_name = chunk_name = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, text: str, extras: Extras) -> TextChoice:
        return TextChoice(index=index, text=text, token_ids=extras.token_ids, spec=extras.spec)

    def ending(self, index: int, finish_reason: str, extras: Extras) -> TextChoice:
        return TextChoice(index=index, text="", finish_reason=finish_reason, stop_reason=extras.stop_reason)

    def whole(self, index: int, text: str, finish_reason: str, extras: Extras) -> TextChoice:
        return TextChoice(
            index=index,
            text=text,
            finish_reason=finish_reason,
            stop_reason=extras.stop_reason,
            token_ids=extras.token_ids,
            spec=extras.spec,
        )
