"""What happens to the TargetLink, and what it asks for. The actor around it carries effects out in order.

Times are seconds on one monotonic clock.
"""

from dataclasses import dataclass

from common.messages.lifecycle import Configure, Message
from services.target.work import RoundResult, RoundWork


@dataclass(frozen=True, slots=True)
class Start:
    """First event of a machine's life."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the gateway or of the draft; its type says which."""

    message: Message


@dataclass(frozen=True, slots=True)
class TimerFired:
    name: str


@dataclass(frozen=True, slots=True)
class PoolReady:
    """Answer to AllocatePool. endpoint: where a draft reaches this process. error: set when it failed."""

    target: int
    endpoint: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RegionReady:
    """Answer to AllocateDraft. manifest: msgpack-encoded MemoryManifest. error: set when it failed."""

    draft: int
    manifest: bytes
    error: str = ""


@dataclass(frozen=True, slots=True)
class RegionTested:
    """Answer to TestRegion. ok: the draft's pattern was read back."""

    draft: int
    nonce: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Executed:
    """Answer to Run."""

    result: RoundResult


Event = Start | Received | TimerFired | PoolReady | RegionReady | RegionTested | Executed


@dataclass(frozen=True, slots=True)
class SendGateway:
    message: Message


@dataclass(frozen=True, slots=True)
class SendDraft:
    """draft: incarnation of the addressee; dropped when its socket is not known."""

    draft: int
    message: Message


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Replaces an earlier timer of the same name."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class AllocatePool:
    """Allocate KV pages and slots as configured, in place of any earlier pool. Answered by PoolReady.
    Not asked for while a Run is unanswered."""

    configure: Configure


@dataclass(frozen=True, slots=True)
class AllocateDraft:
    """Allocate the region of this draft, in place of any earlier one. Answered by RegionReady."""

    draft: int
    kv_bytes_per_position: int


@dataclass(frozen=True, slots=True)
class FreeDraft:
    """The draft is gone: its region may be given back."""

    draft: int


@dataclass(frozen=True, slots=True)
class TestRegion:
    """Read pattern(nonce) back from the draft's region and write pattern(nonce + 1). Answered by
    RegionTested."""

    draft: int
    nonce: int


@dataclass(frozen=True, slots=True)
class ExportRow:
    """The slot's row of the exported page table is now `pages`, by logical page; the rest of the row is 0."""

    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Give to the device. At most one is unanswered."""

    work: RoundWork


@dataclass(frozen=True, slots=True)
class Refused:
    """The gateway does not take this service; worth a log line. The link goes on saying Hello."""

    reason: str


Effect = (
    SendGateway
    | SendDraft
    | SetTimer
    | AllocatePool
    | AllocateDraft
    | FreeDraft
    | TestRegion
    | ExportRow
    | Run
    | Refused
)
