"""Endpoints that generate nothing: models, tokenizer, version, state, metrics."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.admission import check_unicode, encode_messages, invalid
from services.gateway.http.body import decode_body, read_body
from services.gateway.http.front import Front
from services.gateway.http.generate import off_loop, plain_roles
from services.gateway.http.metrics import CONTENT_TYPE
from services.gateway.http.objects import (
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    Status,
    TokenizeAnswer,
    Version,
)
from services.gateway.http.schemas import TOKENIZE_UNBUILT, DetokenizeRequest, TokenizeRequest


async def list_models(front: Front, request: Request) -> Response:
    return _json(ModelList(data=[_card(front)]))


async def retrieve_model(front: Front, request: Request) -> Response:
    front.check_model(request.path_params["model"])
    return _json(_card(front))


async def tokenize(front: Front, request: Request) -> Response:
    raw = await read_body(request, front.settings.max_body_bytes)
    body = decode_body(raw, TokenizeRequest, TOKENIZE_UNBUILT)
    front.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Give exactly one of `prompt` and `messages`.")
    ids = await off_loop(front, len(raw), lambda: _ids(front, body))
    return _json(TokenizeAnswer(len(ids), front.engine.info.max_model_len, ids))


async def detokenize(front: Front, request: Request) -> Response:
    raw = await read_body(request, front.settings.max_body_bytes)
    body = decode_body(raw, DetokenizeRequest, {})
    front.check_model(body.model)
    if body.tokens is None:
        raise invalid("tokens", "`tokens` is required: a list of token ids.")
    vocab_size = front.engine.info.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise invalid("tokens", f"`tokens` must hold ids from 0 to {vocab_size - 1}.")
    return _json(DetokenizeAnswer(front.tokenizer.decode(body.tokens)))


async def version(front: Front, request: Request) -> Response:
    return _json(Version(front.settings.version))


async def health(front: Front, request: Request) -> Response:
    """The gateway itself is alive, whatever the other services do."""
    return _json(Status("ok", front.engine.draft_ready))


async def ready(front: Front, request: Request) -> Response:
    """200 while requests are taken; a drafter is not needed for that."""
    if front.lifecycle.draining:
        return _json(Status("shutting_down", front.engine.draft_ready), 503)
    if not front.engine.ready:
        return _json(Status("starting", front.engine.draft_ready), 503)
    return _json(Status("ready", front.engine.draft_ready))


async def metrics(front: Front, request: Request) -> Response:
    return Response(front.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


def _ids(front: Front, body: TokenizeRequest) -> list[int]:
    if body.prompt is None:
        return encode_messages(front.tokenizer, plain_roles(body.messages))
    check_unicode(body.prompt, "prompt")
    return front.tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)


def _card(front: Front) -> ModelCard:
    info = front.engine.info
    return ModelCard(id=info.model, created=info.created, max_model_len=info.max_model_len)


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
