"""What a client and a gateway say to each other over ZeroMQ (client DEALER, gateway ROUTER).

One message is one frame: a msgpack array whose first element is the type's name and whose other elements are
its fields in order. New fields are only ever appended, with a default, so that either side may be older.

A client says Hello and waits for Welcome; nothing else is taken before. Then, for ids of its own choice
(1, 2, …, never one that is live):

    Generate ─▶ Chunk* ─▶ exactly one of Final, Error

The gateway sends at most as many chunks as it has credits for (`Generate.credit`, then Credit) and merges
what it holds back; the last chunk before a Final needs no credit. Chunks and the Final are numbered from 0 by
`seq`: a gap means that a message was lost. Cancel may come at any time and any number of times; the answer is
the Final, with finish_reason abort. A client sends Heartbeat every `Welcome.heartbeat_ms`; the gateway
answers each. Who hears nothing for MISSED_HEARTBEATS intervals takes the other for lost: the gateway then
cancels the client's requests, the client fails them. An Error with id 0 speaks of the connection, not of a
request.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

PROTOCOL_VERSION = 1
MISSED_HEARTBEATS = 3
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_CREDIT = 32
"""Most chunks of one stream that may be under way."""
HELLO_REQUIRED = "hello_required"
"""Code of the Error that answers a client which the gateway does not know (any more)."""


class WireError(ValueError):
    """Bytes that are not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of every message."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what messages are made of."""


class Params(Part, frozen=True):
    """Parameters of a generation; None means the server's default.

    max_tokens: what is left of the context. temperature: 1; 0 is greedy. top_p: 1. top_k: 0, off. min_p: 0.
    seed: drawn and reported. stop: strings that end the text and are cut off. priority: lower runs first.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None


class Hello(Message, frozen=True):
    """client → gateway. The client speaks every version from proto_min to proto_max. client: name/version."""

    proto_min: int
    proto_max: int
    client: str


class Generate(Message, frozen=True):
    """client → gateway. Exactly one of prompt, messages and token_ids is set.

    messages: objects with role and content. credit: chunks that may be sent at first, 1 … MAX_CREDIT.
    """

    id: int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    params: Params = Params()
    credit: int = MAX_CREDIT


class Credit(Message, frozen=True):
    """client → gateway: this many chunks more."""

    id: int
    chunks: int


class Cancel(Message, frozen=True):
    """client → gateway."""

    id: int


class Goodbye(Message, frozen=True):
    """client → gateway: it leaves, and its requests end."""


class Heartbeat(Message, frozen=True):
    """Both ways. server_epoch: the gateway's run that the sender speaks of."""

    server_epoch: int


class ModelInfo(Part, frozen=True):
    """max_model_len: positions of prompt and output together. drafter: name, or none."""

    name: str
    max_model_len: int
    vocab_size: int
    drafter: str


class Limits(Part, frozen=True):
    """max_requests: live requests of one client."""

    max_requests: int
    max_message_bytes: int


class Welcome(Message, frozen=True):
    """gateway → client. server_epoch: random id of the gateway's run; another one means that all is gone."""

    proto: int
    server_epoch: int
    heartbeat_ms: int
    limits: Limits
    model: ModelInfo


class Reject(Message, frozen=True):
    """gateway → client: not served. status as in Error."""

    status: int
    code: str
    message: str


class Chunk(Message, frozen=True):
    """gateway → client: what one target step, or several merged, added.

    token_ids: committed ids. from_draft: for each, whether it was an accepted draft token. text: may be empty
    while a possible stop string or part of a character is held back. spans: lengths in characters of the
    text's runs, in turn not from the draft and from it, summing to len(text). drafted, accepted: draft tokens
    verified and accepted. steps: target steps in it.
    """

    id: int
    seq: int
    token_ids: list[int]
    text: str
    from_draft: list[bool]
    spans: list[int]
    drafted: int
    accepted: int
    steps: int = 1


class Usage(Part, frozen=True):
    """cached: prompt tokens whose KV was there already."""

    prompt: int
    completion: int
    cached: int


class SpecStats(Part, frozen=True):
    """steps: target steps that sampled for the request. histogram[j]: steps that accepted j draft tokens."""

    steps: int
    drafted: int
    accepted: int
    histogram: list[int]


class Timings(Part, frozen=True):
    """Measured by the gateway from the moment it took the request."""

    queue_s: float
    first_token_s: float
    total_s: float


class Final(Message, frozen=True):
    """gateway → client: the generation ended.

    finish_reason: stop | length | abort. stop_reason: the stop string or stop token id that matched, None
    at the end-of-sequence token. seed: repeats the generation when given again.
    """

    id: int
    seq: int
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    seed: int
    spec: SpecStats
    timings: Timings


class Error(Message, frozen=True):
    """gateway → client: the request failed, or (id 0) what came could not be understood.

    status: HTTP status of the same error. code: such as invalid_value. param: the field at fault.
    """

    id: int
    status: int
    code: str
    message: str
    param: str | None = None


FromClient = Hello | Generate | Credit | Cancel | Heartbeat | Goodbye
FromGateway = Welcome | Reject | Chunk | Final | Error | Heartbeat

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_gateway_decoder: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_any_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


def encode(message: Message) -> bytes:
    """Raises WireError for a field that msgpack cannot carry (a lone surrogate, a foreign number type)."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"{type(message).__name__} cannot be encoded: {error}") from None


def decode_from_client(frame: bytes) -> FromClient:
    """Raises WireError."""
    return _decode(_client_decoder, frame)


def decode_from_gateway(frame: bytes) -> FromGateway:
    """Raises WireError."""
    return _decode(_gateway_decoder, frame)


def request_id_of(frame: bytes) -> int:
    """The request that an undecodable Generate, Credit or Cancel speaks of, or 0."""
    try:
        fields = _any_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return 0
    match fields:
        case ["Generate" | "Credit" | "Cancel", int(request_id), *_] if (
            request_id > 0 and request_id is not True
        ):
            return request_id
    return 0


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from None
