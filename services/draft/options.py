"""Settings of the DraftLink."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """join_s: how long a Propose waits for the verdict of the round before. heartbeat_s: between heartbeats,
    and between repeats of Hello and SelfTest. silence_s: a gateway that said nothing for so long is lost, and
    the link starts over. self_test_s: a self-test without an answer fails after it."""

    join_s: float = 0.005
    heartbeat_s: float = 0.5
    silence_s: float = 30.0
    self_test_s: float = 5.0
