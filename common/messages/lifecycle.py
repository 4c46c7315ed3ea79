"""Start-up, return and liveness: target and draft introduce themselves, the gateway configures them.

Order for a target: TargetHello → Configure → Configured. For a draft, once a target is configured:
DraftHello → (gateway to target) JoinDraft → DraftRegion → (gateway to draft) ConfigureDraft →
(draft to target, direct) SelfTest → SelfTestReply → (draft to gateway) DraftReady.
A service repeats its Hello until it is configured. One that starts over (its gateway fell silent or told it
to) draws a new incarnation first, so an incarnation stands for one configuration.
The gateway repeats Configure, JoinDraft and ConfigureDraft until they are answered; a repeat gets the same
answer.
"""

import msgspec

from common.messages.stamp import Stamp


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message between services: a msgpack array whose first element names the type."""


class TargetHello(Message, frozen=True):
    """target → gateway.

    vocab_size: ids that the model can produce. tokenizer: fingerprint (sha256 hex) of the vocabulary.
    plan: fingerprint of the numeric plan. kv_bytes_per_position: target KV bytes of one position, all layers.
    max_context: positions that the model supports. max_rows: most token rows of one forward. kv_positions:
    what the target has memory for, a drafter's part left out; it counts where no KV memory is given.
    """

    incarnation: int
    protocol: int
    model: str
    vocab_size: int
    tokenizer: str
    plan: str
    device: str
    kv_bytes_per_position: int
    max_context: int
    max_rows: int
    kv_positions: int = 0


class DraftHello(Message, frozen=True):
    """draft → gateway. kv_bytes_per_position is 0 for a drafter without KV (n-gram lookup).

    capture: the target's layers whose entering residual stream the drafter reads, side by side in one hidden
    row; empty for a drafter that reads none. hidden_row_bytes: what it takes such a row to be.
    """

    incarnation: int
    protocol: int
    drafter: str
    vocab_size: int
    tokenizer: str
    device: str
    kv_bytes_per_position: int
    max_k: int
    capture: list[int] = []
    hidden_row_bytes: int = 0


class Configure(Message, frozen=True):
    """gateway → target. A new epoch releases everything that the target held.

    pages counts page 0, which is never given out; slots counts slot 0 likewise.
    max_nodes: most tree nodes of one slot in a round, root included. groups: 0 … groups − 1 have rounds.
    """

    epoch: int
    target: int
    pages: int
    page_size: int
    slots: int
    max_model_len: int
    max_nodes: int
    groups: int = 1


class Configured(Message, frozen=True):
    """target → gateway. endpoint: where a draft reaches this target directly. error: why the pool was not
    made."""

    epoch: int
    target: int
    endpoint: str
    error: str = ""


class JoinDraft(Message, frozen=True):
    """gateway → target: allocate the drafter's region for a draft that said Hello, with hidden rows of the
    layers in capture if there are any."""

    stamp: Stamp
    kv_bytes_per_position: int
    capture: list[int] = []
    hidden_row_bytes: int = 0


class DraftRegion(Message, frozen=True):
    """target → gateway: the msgpack-encoded `common.memory.MemoryManifest` that the draft may attach, or the
    reason why there is none."""

    stamp: Stamp
    manifest: bytes
    error: str = ""


class ConfigureDraft(Message, frozen=True):
    """gateway → draft."""

    stamp: Stamp
    endpoint: str
    manifest: bytes
    pages: int
    page_size: int
    slots: int
    max_model_len: int
    max_nodes: int
    groups: int = 1


class SelfTest(Message, frozen=True):
    """draft → target, direct: the draft wrote pattern(nonce) into the region that it may write."""

    stamp: Stamp
    nonce: int


class SelfTestReply(Message, frozen=True):
    """target → draft: ok if the draft's pattern was read back; the target wrote pattern(nonce + 1)."""

    stamp: Stamp
    nonce: int
    ok: bool


class DraftReady(Message, frozen=True):
    """draft → gateway: attached and tested, or the reason why not."""

    stamp: Stamp
    error: str = ""


class DraftGone(Message, frozen=True):
    """gateway → target: this draft is lost for good; pages that waited for it return to the pool. Sent again
    for every Verdict that still names it."""

    stamp: Stamp


class StartOver(Message, frozen=True):
    """gateway → a service: this incarnation is given up (it seemed lost, or the draft's target is). Let go of
    everything, draw a new incarnation and say Hello. Sent again for whatever it still says."""

    epoch: int
    incarnation: int


class Refused(Message, frozen=True):
    """gateway → a service that said Hello: it is not taken, and why. incarnation: of the addressee."""

    epoch: int
    incarnation: int
    reason: str


class Heartbeat(Message, frozen=True):
    """Both ways between the gateway and a service. incarnation: of the service, in both directions.
    rounds: rounds finished by the sender; busy: device work is running; device_us: time of the device work
    that this incarnation has finished. resident_bytes: of the service's process, shared memory included."""

    epoch: int
    incarnation: int
    rounds: int
    busy: bool
    device_us: int = 0
    resident_bytes: int = 0
