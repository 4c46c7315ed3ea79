"""The target's rounds under one configuration: which is due, its join with the proposal, its verdict."""

from collections import Counter

from common.actors.table import Table
from common.link.rounds import LinkRounds
from common.messages.lifecycle import Configure
from common.messages.rounds import Proposal, ProposalRow, Verdict, Verify
from common.messages.stamp import Stamp
from services.target import events as ev
from services.target.proposals import usable_rows
from services.target.round import Round
from services.target.slots import Slot, Slots
from services.target.work import RoundResult

IDLE, JOINING, RUNNING = STATES = ("idle", "joining", "running")

TABLE = Table(
    STATES,
    {
        Verify: {IDLE: "start_round", JOINING: "note_repeat", RUNNING: "note_repeat"},
        Proposal: {IDLE: "take_proposal", JOINING: "take_proposal", RUNNING: "take_proposal"},
        ev.TimerFired: {JOINING: "stop_waiting"},
        ev.Executed: {RUNNING: "finish_round"},
    },
)


class Rounds(LinkRounds[ev.Effect]):
    """One outstanding round at a time, each executed once.

    stamp: of what is said now; its draft is the one that a region is held for. draft_tested: that draft hears
    verdicts, and pages wait for it.
    """

    table = TABLE

    def __init__(
        self, configure: Configure, stamp: Stamp, vocab_size: int, join_s: float, counters: Counter[str]
    ) -> None:
        super().__init__(IDLE, join_s, counters)
        self.slots = Slots(configure)
        self.stamp = stamp
        self.draft_tested = False
        self._vocab_size = vocab_size
        self._draft_acked = 0
        self._last_round = 0
        self._round: Round | None = None
        self._proposal: Proposal | None = None
        self._draft_word = "none"
        self._verdict: Verdict | None = None

    def draft_joins(self, stamp: Stamp) -> None:
        """Another draft gets a region: it knows no slot yet and has acknowledged nothing."""
        self.stamp = stamp
        self.draft_tested = False
        self._draft_acked = 0
        self._proposal = None

    def draft_gone(self, stamp: Stamp) -> None:
        """What waited for the draft is free; a round does not wait for it any longer."""
        self.draft_joins(stamp)
        self.slots.draft_gone()
        if self.state == JOINING:
            self._run("absent")

    def export_all(self) -> None:
        """Every slot's pages, for a new region."""
        for slot in self.slots.live.values():
            self._export(slot)

    def start_round(self, verify: Verify) -> None:
        """Release, take commits, reserve, admit; then wait for the proposal or run. A repeat gets the last
        verdict again."""
        if self._verdict is not None and verify.round == self._verdict.round:
            self.counters["repeated:Verify"] += 1
            self.effects.append(ev.SendGateway(self._verdict))
            return
        if verify.round != self._last_round + 1 or verify.group != 0:
            self.counters["stale:Verify"] += 1
            return
        self._round = Round(verify, self.slots, self._acked, self.counters)
        self._last_round = verify.round
        self._export_grown()
        if self._proposal is not None and self._proposal.round < verify.round:
            self._proposal = None
        if not (verify.k and self.draft_tested and self._round.verifying()):
            self._run("none")
        elif self._proposal is not None:
            self._run("used")
        else:
            self.state = JOINING
            self.wait_to_join()

    def stop_waiting(self, event: ev.TimerFired) -> None:
        """Verify without the proposal if its deadline has passed."""
        if self.has_waited(event):
            self._run("absent")

    @property
    def _acked(self) -> int | None:
        return self._draft_acked if self.draft_tested else None

    def note_repeat(self, verify: Verify) -> None:
        """The round is under way: its verdict will answer this too."""
        self.counters["repeated:Verify" if verify.round == self._last_round else "stale:Verify"] += 1

    def take_proposal(self, proposal: Proposal) -> None:
        """Let go of pages that the draft has acknowledged; join the proposal if it is for this round or the
        next."""
        if proposal.group != 0 or not 0 <= proposal.acked <= self._last_round + 1:
            self.counters["bad:Proposal"] += 1
            return
        if proposal.acked > self._draft_acked:
            self._draft_acked = proposal.acked
            self.slots.acknowledge(proposal.acked)
        if self.state == JOINING and proposal.round == self._last_round:
            self._proposal = proposal
            self._run("used")
        elif proposal.round == self._last_round + 1 and self._proposal_is_older_than(proposal.round):
            self._proposal = proposal
        elif self.state == RUNNING and proposal.round == self._last_round and self._draft_word == "absent":
            self._draft_word = "late"
        elif proposal.rows:
            self.counters["stale:Proposal"] += 1

    def _proposal_is_older_than(self, round_: int) -> bool:
        return self._proposal is None or self._proposal.round < round_

    def _run(self, draft_word: str) -> None:
        """draft_word: as in Verdict.draft; used when the proposal at hand is this round's."""
        assert self._round is not None
        rows: dict[int, ProposalRow] = {}
        if draft_word == "used" and self._proposal is not None:
            nodes = min(self._round.verify.k + 1, self.slots.max_nodes)
            rows, faults = usable_rows(self._proposal, self._round.verifying(), nodes, self._vocab_size)
            self.counters.update(f"bad_row:{reason}" for reason in faults)
            if not any(len(row.tokens) > 1 for row in rows.values()):
                draft_word = "empty"
            self._proposal = None
        self._draft_word = draft_word
        self.state = RUNNING
        work = self._round.work(rows)
        if work.chunks or work.trees:
            self.effects.append(ev.Run(work))
        else:
            self._conclude(RoundResult(work.group, work.round, (), 0))

    def finish_round(self, event: ev.Executed[RoundResult]) -> None:
        """Turn the device's result into the verdict, with the next round's pages reserved before it is
        sent."""
        self._conclude(event.result)

    def _conclude(self, result: RoundResult) -> None:
        assert self._round is not None
        rows = self._round.verdict_rows(result)
        self._export_grown()
        self._verdict = Verdict(
            self.stamp,
            self._round.verify.group,
            self._last_round,
            rows,
            self._round.admitted,
            self._draft_word,
            self.slots.cache.available,
            self.slots.retiring_pages,
            result.elapsed_us,
            result.error,
        )
        self._round = None
        self.finished += 1
        self.state = IDLE
        self.effects.append(ev.SendGateway(self._verdict))
        if self.draft_tested:
            self.effects.append(ev.SendDraft(self.stamp.draft, self._verdict))

    def _export_grown(self) -> None:
        for slot in self.slots.grown:
            self._export(slot)
        self.slots.grown.clear()

    def _export(self, slot: Slot) -> None:
        self.effects.append(ev.ExportRow(slot.slot, tuple(slot.pages)))
