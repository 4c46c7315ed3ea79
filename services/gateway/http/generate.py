"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from services.gateway.admission import check_prompt_size, encode_messages, encode_text, invalid
from services.gateway.engine import GenerationSpec
from services.gateway.http.answer import stream_answer, whole_answer
from services.gateway.http.body import decode_body, read_body
from services.gateway.http.errors import unsupported
from services.gateway.http.forms import ChatForm, Form, TextForm
from services.gateway.http.front import Front
from services.gateway.http.params import plan_choices
from services.gateway.http.schemas import (
    CHAT_UNBUILT,
    COMPLETION_UNBUILT,
    ChatRequest,
    CompletionRequest,
)

LONG_BODY_BYTES = 2 * 2**10
"""Above this, half a millisecond's worth, a prompt is tokenized on a worker thread: several that come at once
would keep the event loop from every stream and from `/health`."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNBUILT_IN_MESSAGE = ("tool_calls", "tool_call_id", "function_call", "audio")
_Prompts = TypeVar("_Prompts")


async def create_chat_completion(front: Front, request: Request) -> ASGIApp:
    raw = await read_body(request, front.settings.max_body_bytes)
    body = decode_body(raw, ChatRequest, CHAT_UNBUILT)
    front.check_model(body.model)
    texts = [message.get("content") for message in body.messages or ()]
    check_prompt_size(
        front.engine.info,
        "messages",
        text_bytes=sum(len(text) for text in texts if isinstance(text, str)),
        messages=len(texts),
    )
    messages = plain_roles(body.messages)
    prompt = await off_loop(front, len(raw), lambda: encode_messages(front.tokenizer, messages))
    specs, form = plan_choices(
        front,
        body,
        [prompt],
        ChatForm,
        prompt_param="messages",
        max_completion_tokens=body.max_completion_tokens,
    )
    return await _answer(front, request, specs, form, stream=body.stream is True)


async def create_completion(front: Front, request: Request) -> ASGIApp:
    raw = await read_body(request, front.settings.max_body_bytes)
    body = decode_body(raw, CompletionRequest, COMPLETION_UNBUILT)
    front.check_model(body.model)
    prompts = await off_loop(front, len(raw), lambda: _encode_prompts(front, body.prompt))
    specs, form = plan_choices(front, body, prompts, TextForm, prompt_param="prompt")
    return await _answer(front, request, specs, form, stream=body.stream is True)


async def _answer(
    front: Front, request: Request, specs: Sequence[GenerationSpec], form: Form, *, stream: bool
) -> ASGIApp:
    if stream:
        return await stream_answer(front, request, specs, form)
    return await whole_answer(front, request, specs, form)


async def off_loop(front: Front, body_bytes: int, encode: Callable[[], _Prompts]) -> _Prompts:
    """Runs a tokenizer so that the event loop goes on; short bodies are not worth a thread.

    One at a time: together they would only keep the interpreter from the event loop.
    """
    if body_bytes <= LONG_BODY_BYTES:
        return encode()
    async with front.encoding:
        return await asyncio.to_thread(encode)


def plain_roles(messages: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Messages with the roles that chat templates know; `developer` is OpenAI's newer name of `system`.

    Raises RequestError for roles and fields that belong to tools and audio.
    """
    plain: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages or ()):
        param = f"messages[{index}]"
        for name in _UNBUILT_IN_MESSAGE:
            if message.get(name):
                raise unsupported(f"{param}.{name}", f"`{param}.{name}` is not supported by this server.")
        role = message.get("role")
        if role in ("tool", "function"):
            raise unsupported(f"{param}.role", f"`{param}.role` {role!r} is not supported by this server.")
        if not isinstance(role, str) or role not in _ROLES:
            known = ", ".join(_ROLES)
            raise invalid(f"{param}.role", f"`{param}.role` must be one of {known}.")
        plain.append({**message, "role": _ROLES[role]})
    return plain


def _encode_prompts(front: Front, prompt: str | list[str | int | list[int]] | None) -> list[list[int]]:
    """One prompt: a string or token ids. Several: strings or lists of token ids."""
    match prompt:
        case None | []:
            raise invalid("prompt", "`prompt` is required: a string, token ids, or a list of either.")
        case str():
            return [_encode_text(front, prompt)]
        case [int(), *_]:
            return [_of_kind(prompt, int)]
    most = front.settings.max_choices
    if len(prompt) > most:
        raise invalid("prompt", f"`prompt` has {len(prompt)} prompts: at most {most} are allowed.")
    if isinstance(prompt[0], str):
        return [_encode_text(front, text) for text in _of_kind(prompt, str)]
    return _of_kind(prompt, list)


def _encode_text(front: Front, text: str) -> list[int]:
    check_prompt_size(front.engine.info, "prompt", text_bytes=len(text))
    return encode_text(front.tokenizer, text)


_Kind = TypeVar("_Kind")


def _of_kind(prompt: Sequence[object], kind: type[_Kind]) -> list[_Kind]:
    items = [item for item in prompt if isinstance(item, kind)]
    if len(items) != len(prompt):
        raise invalid("prompt", "`prompt` mixes strings, token ids and lists: give a list of one kind.")
    return items
