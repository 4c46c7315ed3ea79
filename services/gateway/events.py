"""What happens to the Coordinator, and what it asks for. Plain data: the actor around it carries effects out
in order.

Times are seconds on one monotonic clock.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from common.actors.machine import SetTimer as SetTimer
from common.actors.machine import Start as Start
from common.actors.machine import TimerFired as TimerFired
from common.messages.lifecycle import Message, TargetHello
from common.sampling.params import SamplingParams
from services.gateway.engine import SpecStats

Peer = Literal["target", "draft"]


class Sink(Protocol):
    """Where a request's tokens become text. Called once for each committed token, in order."""

    def push(self, token_id: int) -> str | None:
        """The finish reason when generation ends with this token (EOS, stop string), else None."""
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. request: never used before in this epoch. prompt_ids: at least one id.
    max_tokens: at least 1. priority: lower runs first."""

    request: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    sink: Sink
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    request: int


@dataclass(frozen=True, slots=True)
class Received:
    """peer: which service's socket the message came in on."""

    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The transport knows that the peer is gone (process exit, overflow of its send queue)."""

    peer: Peer
    reason: str


Event = Start | Submit | Abort | Received | TimerFired | PeerLost


@dataclass(frozen=True, slots=True)
class Send:
    peer: Peer
    message: Message


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens that were committed by one step; the sink has already seen them. drafted, accepted: of this
    step."""

    request: int
    ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Finished:
    """reason: what the sink said (stop, length), length for the end of the context, or abort. cached_tokens:
    leading prompt positions that the target already held when the request was first
    admitted. admitted_at: when its first admission was answered; None if it never was."""

    request: int
    reason: str
    stats: SpecStats
    cached_tokens: int
    admitted_at: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """code: never_fits (refused before anything ran) | error."""

    request: int
    code: str
    error: str
    stats: SpecStats
    cached_tokens: int
    admitted_at: float | None


@dataclass(frozen=True, slots=True)
class TargetReady:
    """Requests run from now on. max_model_len: of the option, the model and the page pool, the smallest."""

    hello: TargetHello
    pages: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class TargetLost:
    """Requests stay and wait for the next one."""

    reason: str


@dataclass(frozen=True, slots=True)
class DraftJoined:
    drafter: str


@dataclass(frozen=True, slots=True)
class DraftLost:
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A service said Hello and is not taken; said once for a reason. Whatever serves goes on."""

    peer: Peer
    reason: str


Effect = (
    Send
    | SetTimer
    | Emit
    | Finished
    | Failed
    | TargetReady
    | TargetLost
    | DraftJoined
    | DraftLost
    | PeerRefused
)
