"""Settings of the Coordinator, and the choice of k."""

from dataclasses import dataclass
from typing import Protocol

from common.messages.rounds import Verdict


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """max_model_len: most ids of a request, prompt included. kv_memory_bytes: for target KV pages;
    None leaves it to the target.
    max_rows: token rows of one target forward. chunk_rows: most prefill rows of one request in a round.
    max_nodes: most tree nodes of a slot, root included. groups: sets of slots that step by themselves, the
    draft working on one while the target works on another. tokenizer: expected fingerprint; "" takes the
    target's.

    heartbeat_s: between heartbeats, and between repeats of a start-up message. silence_s: a peer that said
    nothing for so long is lost. resend_s: a Verify without an answer is sent again after it. round_timeout_s:
    a target that has not finished a round after it is lost, however lively. return_s: requests wait so long
    for a target to come back. stall_s: first pause after a round in which nothing could move; it doubles.
    draft_misses: rounds in a row without a proposal after which k is 0 for draft_pause_s, which doubles too.
    draft_stuck_s: a draft whose device finishes nothing for so long is lost.
    """

    max_model_len: int
    kv_memory_bytes: int | None
    page_size: int = 16
    max_num_seqs: int = 8
    max_rows: int = 512
    chunk_rows: int = 256
    max_nodes: int = 9
    groups: int = 1
    tokenizer: str = ""
    heartbeat_s: float = 0.5
    silence_s: float = 5.0
    resend_s: float = 1.0
    round_timeout_s: float = 60.0
    return_s: float = 120.0
    stall_s: float = 0.005
    stall_max_s: float = 0.5
    draft_misses: int = 3
    draft_pause_s: float = 1.0
    draft_pause_max_s: float = 30.0
    draft_stuck_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RoundSample:
    """A round as its plan had it, and how long its verdict took, without the time that the target's device
    worked for other groups meanwhile. verify_rows: slots that were to be verified, with up to k draft tokens
    each. chunk_rows: prompt rows beside them."""

    k: int
    verify_rows: int
    chunk_rows: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class KBelief:
    """What a controller expects at the batch size of its last round. k: its choice. accepted: at index i the
    share of rows of which more than i draft tokens are accepted. round_s, tokens_per_s: by k; empty until
    something was measured."""

    k: int
    accepted: tuple[float, ...]
    round_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


class KController(Protocol):
    """Chooses how many draft tokens a verify row may have."""

    def choose(self, verify_rows: int) -> int:
        """k of the next round, which verifies so many slots; 0 asks for plain decoding."""
        ...

    def observe(self, verdict: Verdict, sample: RoundSample) -> None:
        """Called with every verdict that counts."""
        ...

    def belief(self) -> KBelief: ...


@dataclass(frozen=True, slots=True)
class FixedK:
    k: int

    def choose(self, verify_rows: int) -> int:
        return self.k

    def observe(self, verdict: Verdict, sample: RoundSample) -> None:
        pass

    def belief(self) -> KBelief:
        return KBelief(self.k, (), (), ())
