"""Request bodies. Every optional field may be null, which is the same as absent."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions share.

    return_token_ids, paceline_spec, paceline_metrics: extensions; ids of every chunk, what was drafted and
    accepted for it, and timings at the end.
    """

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    paceline_spec: bool | None = None
    paceline_metrics: bool | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """prompt: one text, several texts, one prompt of token ids, or several of them."""

    prompt: str | list[str | int | list[int]] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


_CHANGES_TEXT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "echo": (False,),
}

CHAT_UNBUILT: dict[str, tuple[Any, ...]] = _CHANGES_TEXT | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}

COMPLETION_UNBUILT: dict[str, tuple[Any, ...]] = _CHANGES_TEXT | {
    "logprobs": (),
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
}

TOKENIZE_UNBUILT: dict[str, tuple[Any, ...]] = {
    "return_token_strs": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}
"""Fields that the server knows and does not act on → values that mean the same as leaving them out."""
