"""The draft's rounds under one configuration: its logs, what its device works on, and its answers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.actors.table import Table, everywhere
from common.link.rounds import LinkRounds
from common.messages.lifecycle import ConfigureDraft
from common.messages.rounds import Behind, Proposal, ProposalRow, Propose, Verdict
from services.draft import events as ev
from services.draft.logs import DraftLog
from services.draft.work import DraftResult, DraftWork, Tree

IDLE, WAITING, RUNNING = STATES = ("idle", "waiting", "running")

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
    keys, ids: what it drafts for, by slot."""

    round: int
    live_round: int
    keys: dict[int, tuple[int, int]]
    ids: dict[int, tuple[int, ...]]
    trees: dict[int, Tree] = field(default_factory=dict)


class Rounds(LinkRounds[ev.Effect]):
    """One work on the device at a time, and an answer to every Propose.

    has_state: the drafter keeps state by position, so prompts under way are worth extending over.
    """

    table = TABLE

    def __init__(
        self, configure: ConfigureDraft, has_state: bool, join_s: float, counters: Counter[str]
    ) -> None:
        super().__init__(IDLE, join_s, counters)
        self.stamp = configure.stamp
        self.logs: dict[int, DraftLog] = {}
        self._max_model_len = configure.max_model_len
        self._max_nodes = configure.max_nodes
        self._has_state = has_state
        self._released: list[int] = []
        self._round = 0
        self._k = 0
        self._verdict_round = 0
        self._acked_sent = 0
        self._pending: Propose | None = None
        self._running: Working | None = None
        self._early: Working | None = None

    def take_propose(self, propose: Propose) -> None:
        """Take commits and the live set; answer at once if there is nothing to draft or the device is busy,
        else draft, after the verdict of the round before."""
        if propose.round <= self._round or propose.group != 0:
            self.counters["stale:Propose"] += 1
            return
        previous, self._round, self._k = self._round, propose.round, propose.k
        self._pending = propose
        self._take_live_set(propose)
        wanted = propose.k > 0 and any(row.draft for row in propose.rows)
        early, self._early = self._early, None
        if self._running is not None:
            if not wanted or self._running.round != propose.round:
                self.counters["busy"] += wanted
                self._answer(None)
        elif not wanted:
            self.finished += 1
            self._answer(None)
            self._extend()
        elif early is not None and early.round == propose.round:
            self._answer(early)
            self._extend()
        elif previous == propose.round - 1 and previous > self._verdict_round:
            self.state = WAITING
            self.wait_to_join()
        else:
            self._work_on_pending()

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
                self._released.append(slot)
        self.logs = live
        if behind:
            self.counters["gap"] += len(behind)
            self.effects.append(ev.SendGateway(Behind(self.stamp, 0, behind)))

    def take_verdict(self, verdict: Verdict) -> None:
        """Note what comes after each log; draft for the next round before its Propose is here if the device
        is free."""
        if verdict.round <= self._verdict_round or verdict.group != 0:
            self.counters["stale:Verdict"] += 1
            return
        self._verdict_round = verdict.round
        if verdict.round < self._round - 1:
            return
        ready: list[DraftLog] = []
        for row in verdict.rows:
            log = self.logs.get(row.slot)
            if log is not None and log.key == (row.request, row.generation) and log.foresee(row):
                ready.append(log)
        if self.state == WAITING and verdict.round == self._round - 1:
            self._work_on_pending()
        elif self.state == IDLE and verdict.round == self._round and self._k > 0 and ready:
            self._run(verdict.round + 1, ready, ())

    def stop_waiting(self, event: ev.TimerFired) -> None:
        """Draft without the verdict if its deadline has passed."""
        if self.has_waited(event):
            self.counters["missed:Verdict"] += 1
            self._work_on_pending()

    def _work_on_pending(self) -> None:
        assert self._pending is not None
        drafting = [self.logs[row.slot] for row in self._pending.rows if row.draft]
        self._run(self._round, [log for log in drafting if self._is_whole(log)], self._stale_logs())

    def _is_whole(self, log: DraftLog) -> bool:
        """The log reaches as far as the last Propose."""
        commit = log.row.commit
        return len(log.ids) == commit.start + len(commit.ids) and bool(log.ids)

    def _extend(self) -> None:
        """Bring drafter state up to date for slots that are not drafted for yet (prompts under way)."""
        if not self._has_state:
            return
        stale = self._stale_logs()
        if stale:
            self._run(self._round, (), stale)

    def _stale_logs(self) -> list[DraftLog]:
        """Slots that are not drafted for, with ids that the drafter has not seen."""
        return [
            log
            for log in self.logs.values()
            if not log.row.draft and self._is_whole(log) and log.has_room and len(log.handed) < len(log.ids)
        ]

    def _run(self, round_: int, drafting: Iterable[DraftLog], extending: Iterable[DraftLog]) -> None:
        limit = self._max_model_len
        k = min(self._k, self._max_nodes - 1)
        rows = [log.work(k, limit) for log in drafting if log.has_room]
        ids = {row.slot: row.ids for row in rows}
        keys = {row.slot: row.key for row in rows}
        rows += [log.work(0, limit) for log in extending]
        self._running = Working(round_, self._round, keys, ids)
        self.state = RUNNING
        released, self._released = tuple(self._released), []
        self.effects.append(ev.Run(DraftWork(0, round_, tuple(rows), released)))

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
        if self._pending is not None and work.round == self._round:
            self._answer(work)
            self._extend()
        elif work.round == self._round + 1:
            self._early = work
        else:
            self._extend()
        if self._acked() > self._acked_sent:
            self._propose_nothing()

    def _acked(self) -> int:
        return self._round if self._running is None else self._running.live_round

    def _propose_nothing(self) -> None:
        self._acked_sent = self._acked()
        self.effects.append(ev.SendTarget(Proposal(self.stamp, 0, self._round, self._acked_sent, [])))

    def _answer(self, work: Working | None) -> None:
        assert self._pending is not None
        propose, self._pending = self._pending, None
        if self.state == WAITING:
            self.state = IDLE
        drafted = [] if work is None else [self._proposal_row(row.slot, work) for row in propose.rows]
        rows = [row for row in drafted if row is not None]
        self._acked_sent = self._acked()
        self.effects.append(ev.SendTarget(Proposal(self.stamp, 0, propose.round, self._acked_sent, rows)))

    def _proposal_row(self, slot: int, work: Working) -> ProposalRow | None:
        log, tree = self.logs[slot], work.trees.get(slot)
        if tree is None or not log.row.draft or len(tree.tokens) < 2 or work.keys.get(slot) != log.key:
            return None
        if work.ids[slot] != tuple(log.ids) or not self._is_whole(log):
            self.counters["drafted_past_commit"] += 1
            return None
        request, generation = log.key
        return ProposalRow(request, slot, generation, len(log.ids), list(tree.tokens), list(tree.parents))
