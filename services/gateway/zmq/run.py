"""A Generate message becomes a generation, and the generation's chunks go to its stream."""

from __future__ import annotations

import asyncio
from typing import Protocol

from paceline import wire
from services.gateway.admission import (
    GenerationParams,
    PromptTokenizer,
    RequestError,
    build_spec,
    encode_messages,
    encode_text,
    fix_seed,
    invalid,
)
from services.gateway.engine import Engine
from services.gateway.zmq.attribution import TokenTexts
from services.gateway.zmq.stream import Stream


class FrontTokenizer(PromptTokenizer, TokenTexts, Protocol):
    """What the ZeroMQ front needs of `common.model.tokenizer.Tokenizer`."""


async def run(engine: Engine, tokenizer: FrontTokenizer, message: wire.Generate, stream: Stream) -> None:
    """Carries a generation to its Final. Raises RequestError, AdmissionError."""
    params = GenerationParams(
        max_tokens=message.params.max_tokens,
        temperature=message.params.temperature,
        top_p=message.params.top_p,
        top_k=message.params.top_k,
        min_p=message.params.min_p,
        seed=message.params.seed,
        stop=message.params.stop,
        stop_token_ids=message.params.stop_token_ids,
        ignore_eos=message.params.ignore_eos,
        priority=message.params.priority,
    )
    param, prompt_ids = await _prompt_ids(tokenizer, message)
    seed = fix_seed(params.seed)
    spec = build_spec(engine.info, prompt_ids, params, seed=seed, prompt_param=param)
    if stream.cancelled:
        stream.abort(seed)
        return
    generation = engine.submit(spec)
    stream.run(generation)
    async for chunk in generation:
        stream.offer(chunk)
    final = generation.final
    if final.finish_reason == "error":
        raise RequestError(500, "generation_failed", f"The generation failed: {final.error}")
    stream.finish(final, seed)


async def _prompt_ids(tokenizer: FrontTokenizer, message: wire.Generate) -> tuple[str, list[int]]:
    """The field that the prompt came in, and its ids."""
    if sum(given is not None for given in (message.prompt, message.messages, message.token_ids)) != 1:
        raise invalid("prompt", "Give exactly one of `prompt`, `messages` and `token_ids`.")
    if message.token_ids is not None:
        return "token_ids", message.token_ids
    if message.messages is not None:
        return "messages", await asyncio.to_thread(encode_messages, tokenizer, message.messages)
    assert message.prompt is not None
    return "prompt", await asyncio.to_thread(encode_text, tokenizer, message.prompt)
