"""What happens to the DraftLink, and what it asks for. The actor around it carries effects out in order.

Times are seconds on one monotonic clock.
"""

from dataclasses import dataclass

from common.actors.machine import SetTimer as SetTimer
from common.actors.machine import Start as Start
from common.actors.machine import TimerFired as TimerFired
from common.link.events import Executed as Executed
from common.link.events import LinkEffect, LinkEvent
from common.link.events import Received as Received
from common.link.events import Refused as Refused
from common.link.events import Run as Run
from common.link.events import SendGateway as SendGateway
from common.messages.lifecycle import ConfigureDraft, Message


@dataclass(frozen=True, slots=True)
class Attached:
    """Answer to Attach. error: set when the manifest or the memory did not fit."""

    draft: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class PatternRead:
    """Answer to ReadPattern. ok: pattern(nonce) stood there."""

    draft: int
    nonce: int
    ok: bool


Event = LinkEvent | Attached | PatternRead


@dataclass(frozen=True, slots=True)
class SendTarget:
    message: Message


@dataclass(frozen=True, slots=True)
class Attach:
    """Map the region, connect to the endpoint, prepare the drafter. Answered by Attached(draft =
    stamp.draft)."""

    configure: ConfigureDraft


@dataclass(frozen=True, slots=True)
class Detach:
    """Unmap everything of the target, close its socket, drop all drafter state. No Run is unanswered then."""


@dataclass(frozen=True, slots=True)
class WritePattern:
    """Write pattern(nonce) where the draft may write. Not answered."""

    nonce: int


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """Check pattern(nonce) where the target wrote it. Answered by PatternRead."""

    draft: int
    nonce: int


Effect = LinkEffect | SendTarget | Attach | Detach | WritePattern | ReadPattern
