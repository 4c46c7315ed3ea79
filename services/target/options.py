"""Settings of the TargetLink."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """join_s: how long a round waits for its proposal. heartbeat_s: between heartbeats, and between repeats
    of Hello. silence_s: a gateway that said nothing for so long is lost, and the link starts over."""

    join_s: float = 0.05
    heartbeat_s: float = 0.5
    silence_s: float = 30.0
