"""The only place where a token becomes real: from a verdict row to the request's log."""

from dataclasses import dataclass

from common.messages.rounds import VerdictRow
from services.gateway.requests import Request


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step added. reason: set when the request ends with its last id."""

    ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    accepted: int
    reason: str | None


def continues(request: Request, row: VerdictRow) -> bool:
    """The row was computed for the log as it is now, and says what it should."""
    return row.base == len(request.ids) and len(row.ids) == row.accepted + 1


def commit(request: Request, row: VerdictRow, max_model_len: int) -> Committed:
    """Append the row's ids one by one, each shown to the sink first; none after the one that ends the
    request."""
    committed = 0
    reason: str | None = None
    for token in row.ids:
        request.ids.append(token)
        committed += 1
        reason = end_reason(request, token, max_model_len)
        if reason is not None:
            break
    accepted = min(row.accepted, committed)
    request.count_step(row.drafted, accepted)
    from_draft = tuple(j < accepted for j in range(committed))
    return Committed(tuple(row.ids[:committed]), from_draft, accepted, reason)


def end_reason(request: Request, token: int, max_model_len: int) -> str | None:
    """Whether this newest token ends the request: by what the sink says, by max_tokens or by the context."""
    if reason := request.sink.push(token):
        return reason
    if request.generated >= request.max_tokens or len(request.ids) >= max_model_len:
        return "length"
    return None
