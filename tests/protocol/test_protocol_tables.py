"""The machines dispatch by their tables, and docs/protocol.md shows them as they are."""

import re

import pytest
from protocol_tables import PAGE, TABLES, page_with_tables

from common.actors.table import Table
from common.messages import lifecycle, rounds
from services.draft.options import DraftOptions
from services.gateway.options import CoordinatorOptions
from services.target.options import TargetOptions


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_names_a_handler_that_says_what_it_does(name: str) -> None:
    table, machine = TABLES[name]
    for event, state, handler in table:
        assert getattr(machine, handler).__doc__, f"{event.__name__} in {state}: {handler}"


def test_a_cell_for_an_unknown_state_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Table(("here",), {int: {"nowhere": "handler"}})


def test_the_page_shows_the_tables_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_tables(page), "run: PYTHONPATH=. python tests/protocol/protocol_tables.py"


def test_the_page_names_every_message_and_every_timeout() -> None:
    page = PAGE.read_text(encoding="utf-8")
    messages = [
        name
        for module in (lifecycle, rounds)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, lifecycle.Message) and kind is not lifecycle.Message
    ]
    timeouts = {
        name
        for options in (CoordinatorOptions, TargetOptions, DraftOptions)
        for name in options.__dataclass_fields__
        if name.endswith("_s")
    }
    missing = [name for name in (*messages, *timeouts) if not re.search(rf"`{name}`", page)]
    assert missing == []
