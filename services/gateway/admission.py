"""The edge shared by every front: a client's prompt and parameters become a GenerationSpec or a RequestError.

Order for a front: `encode_text`, `encode_messages` or token ids as they came → `fix_seed` → `build_spec`
per choice → `Engine.submit`, whose AdmissionError becomes a RequestError with `refusal`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.sampling.params import SamplingParams
from services.gateway.engine import AdmissionError, EngineInfo, GenerationSpec

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-3
"""A temperature below this counts as 0: dividing logits by less only leaves the range of float32."""
MAX_INT32 = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
DRAWN_SEED_BITS = 53
"""A drawn seed survives a JSON parser that reads numbers as float64."""
MAX_ERROR_CHARS = 1000
"""Bounds what an error message repeats of a request."""
DEFAULT_TEMPERATURE = 1.0
MAX_TOKEN_BYTES = 256
"""No vocabulary of the supported families has a longer token."""


class RequestError(Exception):
    """A request that cannot be served, in the terms of every front.

    status: HTTP status. code: OpenAI's string code (invalid_value, context_length_exceeded,
    rate_limit_exceeded, …). param: the field at fault, None when it is not one field.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        if len(message) > MAX_ERROR_CHARS:
            message = message[: MAX_ERROR_CHARS - 1] + "…"
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


def invalid(param: str, message: str) -> RequestError:
    """A 400 that names the field at fault."""
    return RequestError(400, "invalid_value", message, param)


def refusal(error: AdmissionError) -> RequestError:
    """What a client is told when the engine does not take a valid request."""
    match error.code:
        case "queue_full":
            return RequestError(429, "rate_limit_exceeded", str(error))
        case "never_fits":
            return RequestError(400, "context_length_exceeded", str(error), "prompt")
        case _:
            return RequestError(503, error.code, str(error))


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Parameters as a client gave them; None means absent. Nothing is checked before `build_spec`.

    temperature: 0 … 2, default 1. top_p: (0, 1]. top_k: 1 …; 0 and −1 are off. min_p: 0 … 1.
    seed: −2^63 … 2^64 − 1, taken modulo 2^64. max_tokens: default and most is what is left of the context.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None


class ChatTemplate(Protocol):
    """What admission needs of `common.model.chat_template.ChatTemplate`. Raises ValueError."""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str: ...


class PromptTokenizer(Protocol):
    """What admission needs of `common.model.tokenizer.Tokenizer`."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def encode(self, text: str, add_special: bool) -> list[int]: ...


def build_spec(
    info: EngineInfo,
    prompt_ids: Sequence[int],
    params: GenerationParams,
    *,
    seed: int,
    choice: int = 0,
    prompt_param: str = "prompt",
) -> GenerationSpec:
    """One choice of a request. seed: from `fix_seed`, the same for every choice of the request.

    Raises RequestError, naming the field: prompt_param stands for the field that the prompt came in.
    """
    ids = _check_prompt(info, prompt_ids, prompt_param)
    sampling = SamplingParams(
        temperature=_temperature(params.temperature),
        top_k=_top_k(params.top_k, info.vocab_size),
        top_p=_top_p(params.top_p),
        min_p=_number("min_p", params.min_p, 0.0, 1.0, default=0.0),
        seed=choice_seed(seed, choice),
    )
    room = info.max_model_len - len(ids)
    return GenerationSpec(
        prompt_ids=ids,
        sampling=sampling,
        max_tokens=min(room, _integer("max_tokens", params.max_tokens, 1, MAX_INT32, default=room)),
        stop=_stop(params.stop),
        stop_token_ids=_stop_token_ids(params.stop_token_ids, info.vocab_size),
        ignore_eos=_flag("ignore_eos", params.ignore_eos),
        priority=_integer("priority", params.priority, -MAX_INT32, MAX_INT32, default=0),
    )


def fix_seed(seed: int | None) -> int:
    """The request's seed, given or drawn: what is reported, and what repeats the request when given again."""
    if seed is None:
        return secrets.randbits(DRAWN_SEED_BITS)
    return _integer("seed", seed, MIN_SEED, MAX_SEED, default=0)


def choice_seed(seed: int, choice: int) -> int:
    """Unsigned 64-bit noise key of a choice: output number `choice` of SplitMix64 started at `seed`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def check_prompt_size(info: EngineInfo, param: str, *, text_bytes: int, messages: int = 1) -> None:
    """Refuses what cannot fit, however it is tokenized, before any work goes into it."""
    most = info.max_model_len * MAX_TOKEN_BYTES
    if text_bytes > most or messages > info.max_model_len:
        raise RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt has "
            f"{text_bytes} bytes in {messages} messages, which cannot fit.",
            param,
        )


def encode_text(tokenizer: PromptTokenizer, text: str, *, param: str = "prompt") -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the model puts first."""
    if not isinstance(text, str):
        raise invalid(param, f"`{param}` must be a string, got {_shown(text)}.")
    if not text:
        raise invalid(param, f"`{param}` is empty: give at least one character.")
    check_unicode(text, param)
    return tokenizer.encode(text, add_special=True)


def encode_messages(
    tokenizer: PromptTokenizer, messages: Sequence[Mapping[str, Any]], *, param: str = "messages"
) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks.

    messages: each has a `role` and a `content`, a string or a list of `{"type": "text", "text": …}` parts.
    """
    if tokenizer.chat_template is None:
        raise invalid(param, "The served model has no chat template: send `prompt` instead of messages.")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise invalid(param, f"`{param}` must be a list of at least one message.")
    plain = [_plain_message(message, f"{param}[{index}]") for index, message in enumerate(messages)]
    try:
        text = tokenizer.chat_template.render(plain, add_generation_prompt=True)
    except ValueError as error:
        raise invalid(param, f"The chat template refused the messages: {error}") from None
    return tokenizer.encode(text, add_special=False)


def _plain_message(message: object, param: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise invalid(param, f"`{param}` must be an object with `role` and `content`, got {_shown(message)}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid(f"{param}.role", f"`{param}.role` must be a string such as user, got {_shown(role)}.")
    check_unicode(role, f"{param}.role")
    if isinstance(content, (list, tuple)):
        content = "".join(_text_part(part, f"{param}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid(
            f"{param}.content",
            f"`{param}.content` must be a string or a list of text parts, got {_shown(content)}.",
        )
    check_unicode(content, f"{param}.content")
    return {"role": role, "content": content}


def _text_part(part: object, param: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise invalid(param, f'`{param}` must be {{"type": "text", "text": "…"}}, got {_shown(part)}.')


def check_unicode(text: str, param: str) -> None:
    """Refuses lone surrogates, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            param, f"`{param}` has a lone surrogate at character {error.start}: send UTF-8."
        ) from None


def _check_prompt(info: EngineInfo, prompt_ids: Sequence[int], param: str) -> tuple[int, ...]:
    if len(prompt_ids) == 0:
        raise invalid(param, f"`{param}` is empty: give at least one token.")
    if len(prompt_ids) >= info.max_model_len:
        raise RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt "
            f"contains {len(prompt_ids)} tokens and must leave room for at least one. Please shorten it.",
            param,
        )
    for position, token_id in enumerate(prompt_ids):
        if type(token_id) is not int or not 0 <= token_id < info.vocab_size:
            raise invalid(
                param,
                f"`{param}` has {_shown(token_id)} at position {position}: token ids are integers from 0 to "
                f"{info.vocab_size - 1}.",
            )
    return tuple(prompt_ids)


def _temperature(value: object) -> float:
    temperature = _number("temperature", value, 0.0, MAX_TEMPERATURE, default=DEFAULT_TEMPERATURE)
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _top_p(value: object) -> float:
    top_p = _number("top_p", value, 0.0, 1.0, default=1.0)
    if top_p == 0.0:
        raise invalid("top_p", "`top_p` must be above 0, got 0: use `temperature` 0 for greedy decoding.")
    return top_p


def _top_k(value: object, vocab_size: int) -> int:
    top_k = _integer("top_k", value, -1, MAX_INT32, default=0)
    return 0 if top_k < 1 or top_k >= vocab_size else top_k


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise invalid("stop", f"`stop` must be a string or a list of strings, got {_shown(value)}.")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` has {len(stops)} strings: at most {MAX_STOPS} are allowed.")
    for stop in stops:
        if not isinstance(stop, str):
            raise invalid("stop", f"`stop` must hold strings, got {_shown(stop)}.")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(
                "stop", f"`stop` has a string of {len(stop)} characters: 1 to {MAX_STOP_CHARS} are allowed."
            )
        check_unicode(stop, "stop")
    return tuple(stops)


def _stop_token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise invalid("stop_token_ids", f"`stop_token_ids` must be a list of token ids, got {_shown(value)}.")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(
            "stop_token_ids",
            f"`stop_token_ids` has {len(value)} ids: at most {MAX_STOP_TOKEN_IDS} are allowed.",
        )
    return tuple(_integer("stop_token_ids", token_id, 0, vocab_size - 1, default=0) for token_id in value)


def _flag(param: str, value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(param, f"`{param}` must be true or false, got {_shown(value)}.")
    return value


def _integer(param: str, value: object, low: int, high: int, *, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(param, f"`{param}` must be an integer, got {_shown(value)}.")
    if not low <= value <= high:
        raise invalid(param, f"`{param}` must be from {low} to {high}, got {_shown(value)}.")
    return value


def _number(param: str, value: object, low: float, high: float, *, default: float) -> float:
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise invalid(param, f"`{param}` must be a number, got {_shown(value)}.")
    if not low <= value <= high:
        raise invalid(param, f"`{param}` must be from {low:g} to {high:g}, got {_shown(value)}.")
    return float(value)


def _shown(value: object) -> str:
    """Cut short: Python refuses to print integers of thousands of digits, and nobody reads them."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**64:
        return "an integer of more than 64 bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
