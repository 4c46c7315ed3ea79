"""What happens to the DraftLink, and what it asks for. The actor around it carries effects out in order.

Times are seconds on one monotonic clock.
"""

from dataclasses import dataclass

from common.messages.lifecycle import ConfigureDraft, Message
from services.draft.work import DraftResult, DraftWork


@dataclass(frozen=True, slots=True)
class Start:
    """First event of a machine's life."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the gateway or of the target; its type says which."""

    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    name: str


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


@dataclass(frozen=True, slots=True)
class Executed:
    """Answer to Run."""

    result: DraftResult


Event = Start | Received | TimerFired | Attached | PatternRead | Executed


@dataclass(frozen=True, slots=True)
class SendGateway:
    message: Message


@dataclass(frozen=True, slots=True)
class SendTarget:
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Replaces an earlier timer of the same name."""

    name: str
    at: float


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


@dataclass(frozen=True, slots=True)
class Run:
    """Give to the device. At most one is unanswered."""

    work: DraftWork


@dataclass(frozen=True, slots=True)
class Refused:
    """The gateway or the self-test does not take this service; worth a log line. The link goes on saying
    Hello."""

    reason: str


Effect = SendGateway | SendTarget | SetTimer | Attach | Detach | WritePattern | ReadPattern | Run | Refused
