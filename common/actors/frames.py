"""What stands in the ZeroMQ frames of one message between services.

A told message is one frame, its msgpack. A question, its answer and its failure are two: a head of nine
bytes (one that names the kind, then the question's number, unsigned 64 bits, little-endian), then the msgpack
of the message (for a failure: the reason as UTF-8). In front of them a ROUTER has the peer's identity.
"""

import enum
import re
import struct
from dataclasses import dataclass

MAX_BODY_FRAMES = 2
MAX_REASON_BYTES = 1024

_HEAD = struct.Struct("<cQ")
_IDENTITY = re.compile(rb"[a-z]{1,16}-[0-9a-f]{16}")


class BadFrames(Exception):
    """Frames that no service of this version sends."""


class Kind(enum.Enum):
    TOLD = b""
    QUESTION = b"Q"
    ANSWER = b"A"
    FAILURE = b"F"


@dataclass(frozen=True, slots=True)
class Body:
    """number: of the question; 0 for a told message. payload: msgpack, or UTF-8 of a failure's reason."""

    kind: Kind
    number: int
    payload: bytes


def identity(service: str, incarnation: int) -> str:
    """How a DEALER names itself to a ROUTER: `draft-00000000000004d2`. Raises ValueError."""
    name = f"{service}-{incarnation:016x}"
    if not _IDENTITY.fullmatch(name.encode()):
        raise ValueError(
            f"peer identity {name!r} needs a service of 1 … 16 letters and an incarnation of 64 bits"
        )
    return name


def parse_identity(frame: bytes) -> str:
    """Raises BadFrames."""
    if not _IDENTITY.fullmatch(frame):
        raise BadFrames(f"peer identity {frame[:64]!r} is not of the form service-incarnation")
    return frame.decode("ascii")


def pack(body: Body) -> list[bytes]:
    if body.kind is Kind.TOLD:
        return [body.payload]
    return [_HEAD.pack(body.kind.value, body.number), body.payload]


def parse(frames: list[bytes]) -> Body:
    """Raises BadFrames."""
    if len(frames) == 1:
        return Body(Kind.TOLD, 0, frames[0])
    if len(frames) != 2:
        raise BadFrames(f"a message has 1 or 2 frames, not {len(frames)}")
    head, payload = frames
    if len(head) != _HEAD.size:
        raise BadFrames(f"a head has {_HEAD.size} bytes, not {len(head)}")
    letter, number = _HEAD.unpack(head)
    try:
        return Body(Kind(letter), number, payload)
    except ValueError:
        raise BadFrames(f"no kind of message is marked {letter!r}") from None
