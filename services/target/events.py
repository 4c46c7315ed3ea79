"""What happens to the TargetLink, and what it asks for. The actor around it carries effects out in order.

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
from common.messages.lifecycle import Configure, JoinDraft, Message


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


Event = LinkEvent | PoolReady | RegionReady | RegionTested


@dataclass(frozen=True, slots=True)
class SendDraft:
    """draft: incarnation of the addressee; dropped when its socket is not known."""

    draft: int
    message: Message


@dataclass(frozen=True, slots=True)
class AllocatePool:
    """Allocate KV pages and slots as configured, in place of any earlier pool. Answered by PoolReady.
    Not asked for while a Run is unanswered."""

    configure: Configure


@dataclass(frozen=True, slots=True)
class AllocateDraft:
    """Allocate the region of the draft that joins, in place of any earlier one. Answered by RegionReady."""

    join: JoinDraft

    @property
    def draft(self) -> int:
        return self.join.stamp.draft


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


Effect = LinkEffect | SendDraft | AllocatePool | AllocateDraft | FreeDraft | TestRegion | ExportRow
