"""What every message between services carries: which run of each process it was meant for."""

import msgspec

PROTOCOL_VERSION = 1


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """epoch: random id of the gateway's run. target, draft: incarnations of the services; 0 means none.

    A receiver drops a message whose epoch, whose own incarnation or whose sender's incarnation is not
    the current one, before any effect, and counts it. Between gateway and target the draft's incarnation says
    only which draft the sender holds.
    """

    epoch: int
    target: int
    draft: int = 0
