"""The simulator finds each broken rule about hidden rows: who writes a block when, and who reads it once."""

import pytest
from protocol_simulator import caught

from common.messages.rounds import Consumed
from services.draft import events as dev
from services.draft.logs import DraftLog
from services.draft.rounds import Rounds as DraftRounds
from services.target.rounds import Rounds
from services.target.row_blocks import RowBlocks
from services.target.work import Capture


def test_the_simulator_catches_a_block_that_is_rewritten_before_it_is_consumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RowBlocks, "is_free", lambda self, group, round_: True)
    assert "is being read" in caught(captures=True)


def test_the_simulator_catches_a_capture_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(self: Rounds, verify) -> None:
        if self._serving.draft_tested:
            self._capture = Capture(self._serving.stamp.draft, 0, (1, 2))

    monkeypatch.setattr(Rounds, "_choose_capture", always)
    assert "not asked for" in caught(captures=False)


def test_the_simulator_catches_rows_that_are_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftLog.work

    def keep(self: DraftLog, k: int, limit: int):
        hidden = self.hidden
        row = original(self, k, limit)
        self.hidden = list(hidden)
        return row

    monkeypatch.setattr(DraftLog, "work", keep)
    monkeypatch.setattr(DraftRounds, "_forget_hidden", lambda self: setattr(self, "_unread", 0))
    said = caught(captures=True)
    assert "is read twice" in said or "is being read" in said


def test_the_simulator_catches_a_draft_that_says_consumed_while_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = DraftRounds._run

    def hasty(self: DraftRounds, round_, drafting, extending) -> None:
        unread = self._unread
        original(self, round_, drafting, extending)
        if unread:
            self.effects.append(dev.SendTarget(Consumed(self._drafting.stamp, self.group, unread)))

    monkeypatch.setattr(DraftRounds, "_run", hasty)
    assert "is being read" in caught(captures=True, draft_s=0.1)


def test_the_simulator_catches_rows_of_ids_that_were_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftLog.take_hidden

    def shifted(self: DraftLog, row, block: int, round_: int) -> bool:
        taken = original(self, row, block, round_)
        if taken and row.hidden_count > 1:
            one = self.hidden.pop()
            self.hidden.append(type(one)(one.block, one.round, one.first, one.count, one.start - 1))
        return taken

    monkeypatch.setattr(DraftLog, "take_hidden", shifted)
    assert "due was" in caught(captures=True)
