"""The draft's rounds of one group: its logs, what the device works on for it, and its answers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.actors.table import Table, everywhere
from common.link.rounds import QUEUED, RUNNING, LinkRounds
from common.messages.rounds import Behind, Consumed, Proposal, ProposalRow, Propose, Verdict, hidden_block
from common.messages.stamp import Stamp
from services.draft import events as ev
from services.draft.logs import DraftLog
from services.draft.work import DraftResult, DraftWork, Tree

IDLE, WAITING = "idle", "waiting"
STATES = (IDLE, WAITING, QUEUED, RUNNING)

TABLE = Table(
    STATES,
    {
        Propose: everywhere(STATES, "take_propose"),
        Verdict: everywhere(STATES, "take_verdict"),
        ev.TimerFired: {WAITING: "stop_waiting"},
        ev.Executed: {RUNNING: "finish_work"},
    },
)


@dataclass(frozen=True, slots=True)
class Working:
    """Work on the device, or its outcome. live_round: the Propose whose live set it was started under.
    keys, ids: what it drafts for, by slot. reads: the newest round whose hidden rows it was given, 0 for
    none."""

    round: int
    live_round: int
    keys: dict[int, tuple[int, int]]
    ids: dict[int, tuple[int, ...]]
    reads: int = 0
    trees: dict[int, Tree] = field(default_factory=dict)

    @property
    def only_reads(self) -> bool:
        return self.reads > 0 and not self.ids


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the groups share under one configuration.

    extends_ids: the drafter computes its state from ids alone, so prompts under way are worth extending over.
    Hidden rows of the target go to the device with the next work, and as soon as it is free. released: slots
    that the next work, of whichever group, is to drop first.
    """

    stamp: Stamp
    max_model_len: int
    max_nodes: int
    extends_ids: bool
    released: list[int] = field(default_factory=list)


class Rounds(LinkRounds[ev.Effect]):
    """An answer to every Propose.

    sent: newest round of the group that the gateway is known to have sent a Propose for.
    """

    table = TABLE

    def __init__(self, group: int, drafting: Drafting, join_s: float, counters: Counter[str]) -> None:
        super().__init__(group, IDLE, join_s, counters)
        self.logs: dict[int, DraftLog] = {}
        self.sent = 0
        self._drafting = drafting
        self._round = 0
        self._k = 0
        self._verdict_round = 0
        self._acked_sent = 0
        self._unread = 0
        self._follows = False
        self._pending: Propose | None = None
        self._running: Working | None = None
        self._early: Working | None = None
        self._ahead: list[DraftLog] = []

    def take_propose(self, propose: Propose) -> None:
        """Take commits and the live set; answer at once if there is nothing to draft or the device is busy
        for an older round of the group, else draft, after the verdict of the round before."""
        if propose.round <= self._round:
            self.counters["stale:Propose"] += 1
            return
        self._follows = self._round == propose.round - 1
        self._round, self._k = propose.round, propose.k
        self._pending = propose
        self._take_live_set(propose)
        wanted = propose.k > 0 and any(row.draft for row in propose.rows)
        early, self._early = self._early, None
        self._ahead = []
        if wanted and early is not None and early.round == propose.round:
            self._answer(early)
        elif self._running is not None:
            if not wanted or not (self._running.round == propose.round or self._running.only_reads):
                self.counters["busy"] += wanted
                self._answer(None)
        elif not wanted:
            self.finished += 1
            self._answer(None)
        else:
            self._begin_pending()
        self._let_go()

    def _begin_pending(self) -> None:
        """Draft for the Propose at hand, after the verdict of the round before if it is due."""
        if self._follows and self._verdict_round < self._round - 1:
            self.state = WAITING
            self.wait_to_join()
        else:
            self.state = QUEUED

    def _take_live_set(self, propose: Propose) -> None:
        live: dict[int, DraftLog] = {}
        behind: list[tuple[int, int]] = []
        for row in propose.rows:
            log = self.logs.get(row.slot)
            if log is None or log.key != (row.request, row.generation):
                log = DraftLog(row, [])
            if not log.join(row):
                behind.append((row.request, len(log.ids)))
            live[row.slot] = log
        for slot, log in self.logs.items():
            if slot not in live or live[slot] is not log:
                self._drafting.released.append(slot)
        self.logs = live
        if behind:
            self.counters["gap"] += len(behind)
            self.effects.append(ev.SendGateway(Behind(self._drafting.stamp, self.group, behind)))

    def take_verdict(self, verdict: Verdict) -> None:
        """Note what comes after each log; draft for the next round before its Propose is here as soon as the
        device is free."""
        if verdict.round <= self._verdict_round:
            self.counters["stale:Verdict"] += 1
            return
        self._verdict_round = verdict.round
        if verdict.hidden == "rows":
            self._unread = verdict.round
        elif verdict.hidden == "no_rows":
            self.counters["no_rows"] += 1
        ready = self._foresee(verdict)
        if self.state == WAITING and verdict.round == self._round - 1:
            self.state = QUEUED
        elif verdict.round == self._round and self._k > 0:
            self._ahead = ready
        self._let_go()
        if verdict.hidden == "no_rows" and not self._reads:
            # The target may wait for a Consumed that was lost.
            self._say_consumed(verdict.round)

    def _foresee(self, verdict: Verdict) -> list[DraftLog]:
        """Note tails and hidden rows; the logs whose next verify row is known."""
        ready: list[DraftLog] = []
        block = hidden_block(verdict.group, verdict.round)
        for row in verdict.rows:
            log = self.logs.get(row.slot)
            if log is None or log.key != (row.request, row.generation):
                continue
            if verdict.round >= self._round - 1 and log.foresee(row):
                ready.append(log)
            if row.hidden_count and not log.take_hidden(row, block, verdict.round):
                self.counters["bad_rows:log"] += 1
        return ready

    @property
    def _reads(self) -> bool:
        """Hidden rows are at hand or being read."""
        return self._unread > 0 or (self._running is not None and self._running.reads > 0)

    def _with_hidden(self) -> list[DraftLog]:
        return [log for log in self.logs.values() if log.hidden and log.has_room]

    def _let_go(self) -> None:
        """Say Consumed for blocks that nobody will read."""
        if self._unread and self._running is None and not self._with_hidden():
            self._say_consumed(self._unread)

    def _forget_hidden(self) -> None:
        """What is left has no position to be used at."""
        self._unread = 0
        for log in self.logs.values():
            log.hidden = []

    def _say_consumed(self, round_: int) -> None:
        self._forget_hidden()
        self.effects.append(ev.SendTarget(Consumed(self._drafting.stamp, self.group, round_)))

    def stop_waiting(self, _: ev.TimerFired) -> None:
        """Draft without the verdict if its deadline has passed."""
        if self.has_waited():
            self.counters["missed:Verdict"] += 1
            self.state = QUEUED

    @property
    def _has_missed_a_propose(self) -> bool:
        return self._round < self.sent

    def use_device(self) -> None:
        assert self._pending is not None
        if self._has_missed_a_propose:
            self.counters["missed:Propose"] += 1
            self._answer(None)
            return
        drafting = [self.logs[row.slot] for row in self._pending.rows if row.draft]
        self._run(self._round, [log for log in drafting if self._is_whole(log)], self._stale_logs())

    def draft_ahead(self) -> bool:
        """Take the idle device for the round after a verdict whose Propose is still to come."""
        if self.state != IDLE or not self._ahead or self._has_missed_a_propose:
            return False
        self._run(self._round + 1, self._ahead, ())
        return True

    def read(self) -> bool:
        """Take the idle device for hidden rows that no work has been given yet."""
        if self.state != IDLE or self._has_missed_a_propose or not self._with_hidden():
            return False
        self._run(self._round, (), ())
        return True

    def _is_whole(self, log: DraftLog) -> bool:
        """The log reaches as far as the last Propose."""
        commit = log.row.commit
        return len(log.ids) == commit.start + len(commit.ids) and bool(log.ids)

    def extend(self) -> bool:
        """Take the idle device to bring drafter state up to date for slots that are not drafted for yet
        (prompts under way)."""
        if self.state != IDLE or self._early is not None or self._has_missed_a_propose:
            return False
        stale = self._stale_logs()
        if stale:
            self._run(self._round, (), stale)
        return bool(stale)

    def _stale_logs(self) -> list[DraftLog]:
        """Slots that are not drafted for, with ids that the drafter has not seen."""
        if not self._drafting.extends_ids:
            return []
        return [
            log
            for log in self.logs.values()
            if not log.row.draft and self._is_whole(log) and log.has_room and len(log.handed) < len(log.ids)
        ]

    def _run(self, round_: int, drafting: Iterable[DraftLog], extending: Iterable[DraftLog]) -> None:
        self._ahead = []
        limit = self._drafting.max_model_len
        k = min(self._k, self._drafting.max_nodes - 1)
        rows = [log.work(k, limit) for log in drafting if log.has_room]
        ids = {row.slot: row.ids for row in rows}
        keys = {row.slot: row.key for row in rows}
        rows += [log.work(0, limit) for log in extending]
        rows += [log.work(0, limit) for log in self._with_hidden()]
        self._running = Working(round_, self._round, keys, ids, self._unread)
        self._forget_hidden()
        self.state = RUNNING
        released = tuple(self._drafting.released)
        self._drafting.released.clear()
        self.effects.append(ev.Run(DraftWork(self.group, round_, tuple(rows), released)))

    def finish_work(self, event: ev.Executed[DraftResult]) -> None:
        """Answer the Propose that waits for this work, or keep it for the one to come; acknowledge what the
        work held."""
        assert self._running is not None
        work, self._running = self._running, None
        self.state = IDLE
        self.finished += 1
        if event.result.error:
            self.counters["failed_work"] += 1
            for log in self.logs.values():
                log.handed = ()
        else:
            work.trees.update({tree.slot: tree for tree in event.result.trees})
            self.counters.update(f"bad_rows:{fault}" for fault in event.result.faults)
        if work.reads:
            self.effects.append(ev.SendTarget(Consumed(self._drafting.stamp, self.group, work.reads)))
        if self._pending is not None and work.round == self._round:
            self._answer(work)
        elif work.round == self._round + 1:
            self._early = work
        elif self._pending is not None:
            self._begin_pending()
        self._let_go()
        if self._acked() > self._acked_sent:
            self._propose(self._round, [])

    def _acked(self) -> int:
        return self._round if self._running is None else self._running.live_round

    def _answer(self, work: Working | None) -> None:
        assert self._pending is not None
        propose, self._pending = self._pending, None
        if self.state in (WAITING, QUEUED):
            self.state = IDLE
        drafted = [] if work is None else [self._proposal_row(row.slot, work) for row in propose.rows]
        self._propose(propose.round, [row for row in drafted if row is not None])

    def _propose(self, round_: int, rows: list[ProposalRow]) -> None:
        self._acked_sent = self._acked()
        proposal = Proposal(self._drafting.stamp, self.group, round_, self._acked_sent, rows)
        self.effects.append(ev.SendTarget(proposal))

    def _proposal_row(self, slot: int, work: Working) -> ProposalRow | None:
        log, tree = self.logs[slot], work.trees.get(slot)
        if tree is None or not log.row.draft or len(tree.tokens) < 2 or work.keys.get(slot) != log.key:
            return None
        if work.ids[slot] != tuple(log.ids) or not self._is_whole(log):
            self.counters["drafted_past_commit"] += 1
            return None
        request, generation = log.key
        return ProposalRow(request, slot, generation, len(log.ids), list(tree.tokens), list(tree.parents))
