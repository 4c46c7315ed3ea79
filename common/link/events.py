"""What happens to every ServiceLink, and what each asks for; a service adds its own."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from common.actors.machine import SetTimer, Start, TimerFired
from common.messages.lifecycle import Message

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the gateway or of the other service; its type says which."""

    message: Message


@dataclass(frozen=True, slots=True)
class Executed(Generic[Result]):
    """Answer to Run."""

    result: Result


LinkEvent = Start | Received | TimerFired | Executed[Any]


@dataclass(frozen=True, slots=True)
class SendGateway:
    message: Message


@dataclass(frozen=True, slots=True)
class Run(Generic[Work]):
    """Give to the device. At most one is unanswered."""

    work: Work


@dataclass(frozen=True, slots=True)
class Refused:
    """This service is not taken as it is; worth a log line. The link goes on saying Hello."""

    reason: str


LinkEffect = SendGateway | SetTimer | Run[Any] | Refused
