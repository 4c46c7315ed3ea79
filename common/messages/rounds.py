"""One round: propose → verify → commit.

Verify and Verdict are the only messages that move slots, pages and logs of the target, in round order,
so a lost or repeated message needs one rule: the target executes a round once and answers a repeat from
its last verdict. Admissions and releases ride in the round for the same reason. Rounds are numbered per
group, and a slot belongs to the group whose round admitted it, until it is released.
"""

import msgspec

from common.messages.lifecycle import Message
from common.messages.stamp import Stamp
from common.sampling.params import SamplingParams

HIDDEN_PARITIES = 2
HIDDEN_BLOCKS = 2 * HIDDEN_PARITIES
"""Blocks of hidden rows of a draft's region: two groups, each with one for its even and its odd rounds."""


def hidden_block(group: int, round_: int) -> int:
    """Where a round's hidden rows are; the round after the next of its group writes there again."""
    return group * HIDDEN_PARITIES + round_ % HIDDEN_PARITIES


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a request's log: ids stand at positions start, start + 1, …"""

    start: int
    ids: list[int]


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Give this request a slot. ids is its whole log (prompt + committed)."""

    request: int
    ids: list[int]
    sampling: SamplingParams


class LiveRow(msgspec.Struct, frozen=True, array_like=True):
    """A slot that stays alive, its new commit, and what to compute for it in this round.

    chunk: ids at positions [chunk_start, chunk_end) get KV; equal bounds mean none.
    verify: the slot's bonus token (the last id of the log after the commit) is a verify row.
    """

    request: int
    slot: int
    generation: int
    commit: Commit
    chunk_start: int
    chunk_end: int
    verify: bool


class ReleaseRow(msgspec.Struct, frozen=True, array_like=True):
    """A slot that ends with this round and the last ids of its log. Being absent from `live` releases too."""

    request: int
    slot: int
    generation: int
    commit: Commit


class Verify(Message, frozen=True):
    """gateway → target. live is the group's whole live set. k: draft tokens to expect per verify row;
    0 means the target does not wait for a proposal. capture: write hidden rows for the draft if it reads any.
    """

    stamp: Stamp
    group: int
    round: int
    k: int
    live: list[LiveRow]
    admits: list[Admit]
    releases: list[ReleaseRow]
    capture: bool = False


class AdmitAnswer(msgspec.Struct, frozen=True, array_like=True):
    """status: ok | no_slot | no_room | never_fits. cached: leading positions whose KV is already there, in
    pages that may be shared and are not to be written; at most committed − 1.
    allocated: positions reserved."""

    request: int
    status: str
    slot: int = 0
    generation: int = 0
    cached: int = 0
    allocated: int = 0


class VerdictRow(msgspec.Struct, frozen=True, array_like=True):
    """The target's answer for one live row.

    status: ok (ids hold the accepted path, then the new bonus token) | prefilled (chunk done, nothing
    sampled) | idle (nothing asked) | no_room (no pages for the step; nothing was computed) | gap (the commit
    did not join on: base says how many ids the target has; or the chunk or the verify row did not join on: kv
    says how many positions it has) | unknown (no such slot, or a commit against its log, which releases it:
    admit again) | failed (the forward failed; Verdict.error says how; nothing was computed).
    base: committed length that the row was computed for. kv: valid KV length of the slot afterwards.
    drafted: draft nodes verified, root excluded. accepted: drafted tokens on the accepted path = len(ids) −
    1. hidden_first, hidden_count: where the round's block has this row's hidden rows, which are those of the
    positions kv − hidden_count … kv − 1: the chunk's, then the root's and the accepted path's.
    """

    request: int
    slot: int
    generation: int
    status: str
    base: int
    kv: int
    allocated: int
    ids: list[int]
    drafted: int = 0
    accepted: int = 0
    hidden_first: int = 0
    hidden_count: int = 0


class Verdict(Message, frozen=True):
    """target → gateway, and to a draft whose self-test has passed.

    stamp.draft: the draft that the target holds a region for. draft: none (the round did not wait: k was 0,
    no row to verify, or no draft) | used (a row was verified with draft nodes) | empty (a proposal came,
    without a usable row) | absent (none by the deadline) | late (it came after the deadline, before the
    verdict). free_pages, retiring_pages: the pool after the round. Free are pages that can be given out at
    once, those that only the prefix cache holds included; retiring pages wait for the draft's acknowledgement
    (one that two slots held counts twice). elapsed_us: device time of the round. error: of a failed forward.
    serial: verdicts made so far, of all groups and this one included: what an older one says of the pool is
    out of date.
    hidden: none (not asked for, or nothing was computed) | rows (in the block of this group and the round's
    parity, which stays as it is until the draft says Consumed) | no_rows (asked for, but the draft has not
    consumed what the block holds, or the forward failed).
    """

    stamp: Stamp
    group: int
    round: int
    rows: list[VerdictRow]
    admitted: list[AdmitAnswer]
    draft: str
    free_pages: int
    retiring_pages: int
    elapsed_us: int
    error: str = ""
    serial: int = 0
    hidden: str = "none"


class ProposeRow(msgspec.Struct, frozen=True, array_like=True):
    """A slot that the draft keeps, its new commit, and whether to draft for it.

    A slot's first commit starts at 0 and carries its whole log. allocated: positions that the draft may
    write below. sampling lets a drafter rank with the target's noise.
    """

    request: int
    slot: int
    generation: int
    commit: Commit
    allocated: int
    draft: bool
    sampling: SamplingParams


class Propose(Message, frozen=True):
    """gateway → draft. rows is the group's whole live set as the draft should know it.

    sent: by group, the newest round that this draft was sent a Propose for, this one included. The draft
    starts no work for a group of which it has missed one: its log may end before pages that others share.
    """

    stamp: Stamp
    group: int
    round: int
    k: int
    rows: list[ProposeRow]
    sent: list[int] = msgspec.field(default_factory=list)


class ProposalRow(msgspec.Struct, frozen=True, array_like=True):
    """A token tree: node 0 is the root (the bonus token at position base − 1), parents[0] is −1 and
    parents[j] < j. base: committed length that it continues."""

    request: int
    slot: int
    generation: int
    base: int
    tokens: list[int]
    parents: list[int]


class Proposal(Message, frozen=True):
    """draft → target, direct. rows may be empty.

    acked: newest round of the group such that no work started under an older live set still runs; pages of
    slots that the group released up to that round may be given out again. It counts whichever round the
    proposal is for; a draft sends a further proposal without rows when it grows.
    """

    stamp: Stamp
    group: int
    round: int
    acked: int
    rows: list[ProposalRow]


class Consumed(Message, frozen=True):
    """draft → target, direct: it no longer reads any block of hidden rows of this group that was written in
    this round or before. Sent again for a verdict with no_rows, as it may be lost."""

    stamp: Stamp
    group: int
    round: int


class Behind(Message, frozen=True):
    """draft → gateway: for these requests the draft has `have` ids; send from there."""

    stamp: Stamp
    group: int
    rows: list[tuple[int, int]]
