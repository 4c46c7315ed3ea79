"""What every state machine does alike."""

from collections import Counter

import pytest

from common.actors.machine import TIMER_SLACK_S, Machine, SetTimer
from common.actors.table import Table


class Door(Machine[str]):
    table = Table(("open", "shut"), {int: {"open": "shut_it"}})

    def shut_it(self, hard: int) -> None:
        """Shut."""
        self.state = "shut"
        self.effects.append("bang" * hard)


@pytest.fixture
def door() -> Door:
    return Door("open", Counter())


def test_an_event_goes_to_the_handler_of_its_cell(door: Door) -> None:
    door.dispatch(2)
    assert (door.state, door.effects, door.counters) == ("shut", ["bangbang"], Counter())


def test_what_has_no_cell_is_dropped_and_counted(door: Door) -> None:
    door.dispatch(1)
    door.dispatch(1)
    door.dispatch("knock")
    assert door.effects == ["bang"]
    assert door.counters == {"dropped:shut:int": 1, "dropped:shut:str": 1}


def test_a_timer_that_fires_a_little_early_is_due(door: Door) -> None:
    door.set_timer("wait", 5.0)
    door.now = 5.0 - TIMER_SLACK_S / 2
    assert door.effects == [SetTimer("wait", 5.0)]
    assert door.is_due(5.0)
    door.now = 5.0 - 2 * TIMER_SLACK_S
    assert not door.is_due(5.0)
