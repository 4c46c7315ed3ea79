"""Why a message was not delivered or a question not answered."""


class Undeliverable(Exception):
    """The message was not taken; nothing has happened. Base of what `tell` raises."""


class MailboxFull(Undeliverable):
    """The receiver has as many messages waiting as it accepts."""


class ActorStopped(Undeliverable):
    """The actor is gone, or failed while it worked on the question."""


class PeerLost(Undeliverable):
    """The process on the other side of a socket is gone or no longer reads."""


class AskTimeout(Exception):
    """No answer came in time. Whether the question was worked on is not known."""
