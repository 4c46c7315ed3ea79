"""What every endpoint of the HTTP front works with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.admission import PromptTokenizer, RequestError
from services.gateway.engine import Engine
from services.gateway.http.lifecycle import Lifecycle
from services.gateway.http.metrics import GatewayMetrics
from services.gateway.http.settings import HttpSettings


class HttpTokenizer(PromptTokenizer, Protocol):
    """What the HTTP front needs of `common.model.tokenizer.Tokenizer`."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Front:
    engine: Engine
    tokenizer: HttpTokenizer
    settings: HttpSettings
    metrics: GatewayMetrics
    lifecycle: Lifecycle
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_model(self, model: str | None) -> None:
        """Raises RequestError (404) for a model that is not the served one; None means the served one."""
        served = self.engine.info.model
        if model is not None and model != served:
            raise RequestError(
                404,
                "model_not_found",
                f"The model `{model}` does not exist: this server has `{served}`.",
                "model",
            )
