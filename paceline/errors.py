"""What a client raises. Every error is a PacelineError and says what to do."""


class PacelineError(Exception):
    """Base of all errors of this package; raised itself for misuse, such as a closed client."""


class ConnectionLost(PacelineError, ConnectionError):
    """The server went away, restarted, or lost part of a stream. Nothing says how far it had come."""


class RequestTimeout(PacelineError, TimeoutError):
    """The server did not answer, or a generation did not end, within the time given."""


class RequestRefused(PacelineError):
    """The server answered with an error.

    code: machine-readable, such as context_length_exceeded. param: the field at fault, if it is one field.
    """

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class InvalidRequest(RequestRefused):
    """The request cannot be served as it is: change it."""


class Overloaded(RequestRefused):
    """Too many requests are waiting: try again later."""


class Unavailable(RequestRefused):
    """The server is starting or shutting down: try again later."""


class ServerError(RequestRefused):
    """The server failed while it served the request."""


def from_status(status: int, message: str, code: str, param: str | None = None) -> RequestRefused:
    """The error for an HTTP-like status: 429, 503, other 4xx, the rest."""
    kind: type[RequestRefused]
    if status == 429:
        kind = Overloaded
    elif status == 503:
        kind = Unavailable
    elif 400 <= status < 500:
        kind = InvalidRequest
    else:
        kind = ServerError
    return kind(message, code, param)
