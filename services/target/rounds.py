"""The target's rounds of one group: which is due, its join with the proposal, its verdict."""

from collections import Counter
from dataclasses import dataclass, field, replace

from common.actors.table import Table, everywhere
from common.link.rounds import QUEUED, RUNNING, LinkRounds
from common.messages.rounds import Consumed, Proposal, ProposalRow, Verdict, Verify, hidden_block
from common.messages.stamp import Stamp
from services.target import events as ev
from services.target.proposals import usable_rows
from services.target.round import Round
from services.target.row_blocks import RowBlocks
from services.target.slots import Slots
from services.target.work import Capture, RoundResult

IDLE, JOINING = "idle", "joining"
STATES = (IDLE, JOINING, QUEUED, RUNNING)
AT_WORK = (JOINING, QUEUED, RUNNING)

TABLE = Table(
    STATES,
    {
        Verify: {IDLE: "start_round", **everywhere(AT_WORK, "note_repeat")},
        Proposal: everywhere(STATES, "take_proposal"),
        Consumed: everywhere(STATES, "take_back_block"),
        ev.TimerFired: {JOINING: "stop_waiting"},
        ev.Executed: {RUNNING: "finish_round"},
    },
)


@dataclass(slots=True)
class Serving:
    """What the groups share under one configuration.

    stamp: of what is said now; its draft is the one that a region is held for. draft_tested: that draft hears
    verdicts, and pages wait for it. layers: whose states it reads in hidden rows; empty for none. blocks:
    where they go. verdicts: how many were made.
    """

    slots: Slots
    stamp: Stamp
    vocab_size: int
    draft_tested: bool = False
    layers: tuple[int, ...] = ()
    blocks: RowBlocks = field(default_factory=RowBlocks)
    verdicts: int = 0


class Rounds(LinkRounds[ev.Effect]):
    """One outstanding round at a time, each executed once.

    A round is queued when it has its proposal or has waited for it long enough; one that comes while the
    round is still queued is taken too.
    """

    table = TABLE

    def __init__(self, group: int, serving: Serving, join_s: float, counters: Counter[str]) -> None:
        super().__init__(group, IDLE, join_s, counters)
        self._serving = serving
        self._draft_acked = 0
        self._last_round = 0
        self._round: Round | None = None
        self._early: Proposal | None = None
        self._joined: Proposal | None = None
        self._draft_word = "none"
        self._capture: Capture | None = None
        self._hidden_word = "none"
        self._verdict: Verdict | None = None

    def forget_draft(self) -> None:
        """Another draft, or none: it has acknowledged nothing, and its predecessor's proposals are void."""
        self._draft_acked = 0
        self._early = self._joined = None

    def stop_joining(self) -> None:
        """There is no draft any longer: a round does not wait for it."""
        if self.state == JOINING:
            self._draft_word = "absent"
            self.state = QUEUED

    def start_round(self, verify: Verify) -> None:
        """Release, take commits, reserve, admit; then wait for the proposal, or for the device. A repeat gets
        the last verdict again."""
        if self._verdict is not None and verify.round == self._verdict.round:
            self.counters["repeated:Verify"] += 1
            self.effects.append(ev.SendGateway(self._verdict))
            return
        if verify.round != self._last_round + 1:
            self.counters["stale:Verify"] += 1
            return
        self._round = Round(verify, self._serving.slots, self._acked, self.counters)
        self._last_round = verify.round
        self._export_grown()
        early, self._early, self._joined = self._early, None, None
        self._draft_word = "none"
        self._capture, self._hidden_word = None, "none"
        if not self._round.has_work:
            self._conclude(RoundResult(self.group, verify.round, (), 0))
        elif not (verify.k and self._serving.draft_tested and self._round.verifying()):
            self.state = QUEUED
        elif early is not None and early.round == verify.round:
            self._join(early)
        else:
            self.state = JOINING
            self.wait_to_join()

    def _join(self, proposal: Proposal) -> None:
        self._joined = proposal
        self._draft_word = "used"
        self.state = QUEUED

    def stop_waiting(self, _: ev.TimerFired) -> None:
        """Verify without the proposal if its deadline has passed."""
        if self.has_waited():
            self.stop_joining()

    @property
    def _acked(self) -> int | None:
        return self._draft_acked if self._serving.draft_tested else None

    def note_repeat(self, verify: Verify) -> None:
        """The round is under way: its verdict will answer this too."""
        self.counters["repeated:Verify" if verify.round == self._last_round else "stale:Verify"] += 1

    def take_proposal(self, proposal: Proposal) -> None:
        """Let go of pages that the draft has acknowledged; join the proposal if it is for this round, which
        the device has not begun, or for the next."""
        if not 0 <= proposal.acked <= self._last_round + 1:
            self.counters["bad:Proposal"] += 1
            return
        if proposal.acked > self._draft_acked:
            self._draft_acked = proposal.acked
            self._serving.slots.acknowledge(self.group, proposal.acked)
        is_current = proposal.round == self._last_round
        if is_current and self._waits_for_proposal:
            self._join(proposal)
        elif proposal.round == self._last_round + 1 and self._early_is_older_than(proposal.round):
            self._early = proposal
        elif is_current and self.state == RUNNING and self._draft_word == "absent":
            self._draft_word = "late"
        elif proposal.rows:
            self.counters["stale:Proposal"] += 1

    @property
    def _waits_for_proposal(self) -> bool:
        return self.state == JOINING or (self.state == QUEUED and self._draft_word == "absent")

    def _early_is_older_than(self, round_: int) -> bool:
        return self._early is None or self._early.round < round_

    def use_device(self) -> None:
        assert self._round is not None
        rows: dict[int, ProposalRow] = {}
        proposal, self._joined = self._joined, None
        if self._draft_word == "used" and proposal is not None:
            nodes = min(self._round.verify.k + 1, self._serving.slots.max_nodes)
            vocab_size = self._serving.vocab_size
            rows, faults = usable_rows(proposal, self._round.verifying(), nodes, vocab_size)
            self.counters.update(f"bad_row:{reason}" for reason in faults)
            if not any(len(row.tokens) > 1 for row in rows.values()):
                self._draft_word = "empty"
        elif self._draft_word == "used":
            self._draft_word = "absent"
        self.state = RUNNING
        self._choose_capture(self._round.verify)
        self.effects.append(ev.Run(replace(self._round.work(rows), capture=self._capture)))

    def _choose_capture(self, verify: Verify) -> None:
        """Hidden rows are written if the draft is there and wants them and has consumed what their block
        holds."""
        serving = self._serving
        if not (verify.capture and serving.layers and serving.draft_tested):
            return
        self._hidden_word = "no_rows"
        if serving.blocks.is_free(self.group, verify.round):
            block = hidden_block(self.group, verify.round)
            self._capture = Capture(serving.stamp.draft, block, serving.layers)
        else:
            self.counters["no_rows"] += 1

    def take_back_block(self, message: Consumed) -> None:
        """The draft has read the group's blocks up to that round: they may be written again."""
        if not 0 <= message.round <= self._last_round:
            self.counters["bad:Consumed"] += 1
            return
        self._serving.blocks.consumed(self.group, message.round)

    def finish_round(self, event: ev.Executed[RoundResult]) -> None:
        """Turn the device's result into the verdict, with the next round's pages reserved before it is
        sent."""
        self._conclude(event.result)

    def _conclude(self, result: RoundResult) -> None:
        assert self._round is not None
        serving = self._serving
        hidden = result.hidden
        if self._capture is None or self._capture.draft != serving.stamp.draft:
            hidden = ()
        if hidden:
            self._hidden_word = "rows"
            serving.blocks.write(self.group, self._last_round)
        rows = self._round.verdict_rows(result, hidden)
        self._export_grown()
        serving.verdicts += 1
        self._verdict = Verdict(
            serving.stamp,
            self.group,
            self._last_round,
            rows,
            self._round.admitted,
            self._draft_word,
            serving.slots.cache.available,
            serving.slots.retiring_pages,
            result.elapsed_us,
            result.error,
            serving.verdicts,
            self._hidden_word,
        )
        self._round = None
        self.finished += 1
        self.state = IDLE
        self.effects.append(ev.SendGateway(self._verdict))
        if serving.draft_tested:
            self.effects.append(ev.SendDraft(serving.stamp.draft, self._verdict))

    def _export_grown(self) -> None:
        grown = self._serving.slots.grown
        self.effects += [ev.ExportRow(slot.slot, tuple(slot.pages)) for slot in grown]
        grown.clear()
