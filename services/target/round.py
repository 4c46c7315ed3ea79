"""One round of the target, from its Verify to the rows of its verdict."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.kv.lengths import most_nodes
from common.messages.rounds import Admit, AdmitAnswer, LiveRow, ProposalRow, VerdictRow, Verify
from services.target.slots import Slot, Slots
from services.target.work import HiddenSpan, PrefillChunk, RoundResult, RoundWork, TreeRows

NO_ROWS = HiddenSpan(0, 0, 0)


@dataclass(slots=True)
class Planned:
    """A live row. status: work while its result is due, else the status of its verdict row. drafted: nodes to
    verify, root excluded."""

    row: LiveRow
    slot: Slot | None
    status: str
    drafted: int = 0

    @property
    def has_chunk(self) -> bool:
        return self.row.chunk_end > self.row.chunk_start


class Round:
    """Releases, commits, reservations and admissions are done when it is made; then work, then verdict rows.

    acked: newest round of the group that the draft has acknowledged, None without a draft.
    """

    def __init__(self, verify: Verify, slots: Slots, acked: int | None, counters: Counter[str]) -> None:
        self.verify = verify
        self.group = verify.group
        self.number = verify.round
        self._slots = slots
        self._acked = acked
        self._counters = counters
        self._release()
        self.planned = [self._plan(row) for row in verify.live]
        self.admitted = [self._admit(admit) for admit in verify.admits]

    def _release(self) -> None:
        for ended in self.verify.releases:
            slot = self._slots.find(self.group, ended.request, ended.slot, ended.generation)
            if slot is not None:
                slot.join(ended.commit)
                self._slots.release(slot, self.number, self._acked)
        listed = {(row.request, row.slot, row.generation) for row in self.verify.live}
        for slot in self._slots.live_in(self.group):
            if (slot.request, slot.slot, slot.generation) not in listed:
                self._slots.release(slot, self.number, self._acked)

    def _plan(self, row: LiveRow) -> Planned:
        slot = self._slots.find(self.group, row.request, row.slot, row.generation)
        if slot is None:
            return Planned(row, None, "unknown")
        joined = slot.join(row.commit)
        if joined == "conflict":
            self._counters["conflicting_commit"] += 1
            self._slots.release(slot, self.number, self._acked)
            return Planned(row, None, "unknown")
        if joined == "gap":
            return Planned(row, slot, "gap")
        self._slots.settle(slot)
        planned = Planned(row, slot, "work")
        if not planned.has_chunk and not row.verify:
            planned.status = "idle"
        elif not self._joins_on(planned, slot):
            planned.status = "gap"
        else:
            committed = len(slot.ids)
            self._slots.reserve(slot, committed)
            if self._slots.allocated(slot) < (committed if row.verify else row.chunk_end):
                planned.status = "no_room"
        return planned

    def _joins_on(self, planned: Planned, slot: Slot) -> bool:
        """The chunk and the verify row leave no position without KV, stay within the log and write to no
        settled page."""
        row, committed, reached = planned.row, len(slot.ids), slot.kv
        if planned.has_chunk:
            if not (
                self._slots.first_writable(slot) <= row.chunk_start <= slot.kv and row.chunk_end < committed
            ):
                return False
            reached = row.chunk_end
        return not row.verify or committed - 1 <= reached <= committed < self._slots.max_model_len

    def _admit(self, admit: Admit) -> AdmitAnswer:
        slot = self._slots.admit(self.group, admit)
        if isinstance(slot, str):
            return AdmitAnswer(admit.request, slot)
        allocated = self._slots.allocated(slot)
        return AdmitAnswer(slot.request, "ok", slot.slot, slot.generation, slot.cached, allocated)

    @property
    def has_work(self) -> bool:
        """Whether the device has anything to do for it."""
        return any(planned.status == "work" for planned in self.planned)

    def verifying(self) -> dict[int, Slot]:
        """Slots whose bonus token is verified in this round."""
        return {
            planned.slot.slot: planned.slot
            for planned in self.planned
            if planned.slot is not None and planned.status == "work" and planned.row.verify
        }

    def work(self, proposed: Mapping[int, ProposalRow]) -> RoundWork:
        """What the device has to do. proposed: usable proposal rows by slot; cut to the positions there
        are."""
        chunks: list[PrefillChunk] = []
        trees: list[TreeRows] = []
        for planned in self.planned:
            slot, row = planned.slot, planned.row
            if slot is None or planned.status != "work":
                continue
            pages = tuple(slot.pages)
            if planned.has_chunk:
                ids = tuple(slot.ids[row.chunk_start : row.chunk_end])
                chunks.append(PrefillChunk(slot.slot, pages, row.chunk_start, ids))
            if row.verify:
                tree = self._tree(slot, pages, proposed.get(slot.slot))
                planned.drafted = len(tree.tokens) - 1
                trees.append(tree)
        return RoundWork(self.group, self.number, tuple(chunks), tuple(trees))

    def _tree(self, slot: Slot, pages: tuple[int, ...], proposed: ProposalRow | None) -> TreeRows:
        base, slots = len(slot.ids), self._slots
        if proposed is None:
            return TreeRows(slot.slot, pages, base, (slot.ids[-1],), (-1,), slot.sampling)
        fit = most_nodes(base, slots.allocated(slot), slots.max_nodes, slots.max_model_len)
        tokens, parents = tuple(proposed.tokens[:fit]), tuple(proposed.parents[:fit])
        return TreeRows(slot.slot, pages, base, tokens, parents, slot.sampling)

    def verdict_rows(self, result: RoundResult, hidden: Iterable[HiddenSpan]) -> list[VerdictRow]:
        """The target's answers, with pages reserved for every node of each slot's next round. hidden: where
        the draft finds the hidden rows."""
        sampled = {tree.slot: tree.ids for tree in result.trees}
        spans = {span.slot: span for span in hidden}
        return [self._verdict_row(planned, result.error, sampled, spans) for planned in self.planned]

    def _verdict_row(
        self,
        planned: Planned,
        error: str,
        sampled: Mapping[int, tuple[int, ...]],
        spans: Mapping[int, HiddenSpan],
    ) -> VerdictRow:
        row, slot, status = planned.row, planned.slot, planned.status
        if slot is None:
            return VerdictRow(row.request, row.slot, row.generation, status, 0, 0, 0, [])
        base = len(slot.ids)
        ids: tuple[int, ...] = ()
        if status == "work" and error:
            status = "failed"
        elif status == "work":
            status = "prefilled"
            if planned.has_chunk:
                slot.kv = row.chunk_end
                self._slots.settle(slot)
            if row.verify:
                status = "ok"
                ids = sampled[slot.slot]
                slot.kv, slot.speculated = base, ids
                if base + len(ids) < self._slots.max_model_len:
                    self._slots.reserve(slot, base + len(ids))
        accepted = max(0, len(ids) - 1)
        kv, allocated = slot.kv + accepted, self._slots.allocated(slot)
        drafted = planned.drafted if ids else 0
        span = spans.get(slot.slot, NO_ROWS)
        return VerdictRow(
            row.request,
            row.slot,
            row.generation,
            status,
            base,
            kv,
            allocated,
            list(ids),
            drafted,
            accepted,
            span.first,
            span.count,
        )
