"""A state machine's state × event table: the machine dispatches by it, the docs print it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


class Table:
    """cells: event type → {state: name of the handler method}. What has no cell is dropped and counted."""

    def __init__(self, states: tuple[str, ...], cells: Mapping[type, Mapping[str, str]]) -> None:
        self.states = states
        self.events = tuple(cells)
        self._handlers = {
            (state, event): handler for event, row in cells.items() for state, handler in row.items()
        }
        unknown = {state for state, _ in self._handlers} - set(states)
        if unknown:
            raise ValueError(f"cells for states that the machine does not have: {sorted(unknown)}")

    def handler(self, state: str, event: type) -> str | None:
        return self._handlers.get((state, event))

    def dispatch(self, machine: object, state: str, subject: object, counters: Counter[str]) -> None:
        """Give subject to the machine's handler for it in this state, or drop and count it."""
        handler = self.handler(state, type(subject))
        if handler is None:
            counters[f"dropped:{state}:{type(subject).__name__}"] += 1
        else:
            getattr(machine, handler)(subject)

    def __iter__(self) -> Iterator[tuple[type, str, str]]:
        """Every cell: event type, state, handler name."""
        for (state, event), handler in self._handlers.items():
            yield event, state, handler


def everywhere(states: tuple[str, ...], handler: str) -> dict[str, str]:
    return dict.fromkeys(states, handler)


def render(table: Table, machine: type[Any]) -> str:
    """The table in Markdown, events down and states across, then what each handler does (its docstring)."""
    lines = ["| event | " + " | ".join(table.states) + " |", "|---" * (len(table.states) + 1) + "|"]
    names: list[str] = []
    for event in table.events:
        cells = [table.handler(state, event) or "—" for state in table.states]
        names += [cell for cell in dict.fromkeys(cells) if cell != "—" and cell not in names]
        lines.append(f"| `{event.__name__}` | " + " | ".join(cells) + " |")
    lines.append("")
    for name in names:
        summary = " ".join((getattr(machine, name).__doc__ or "").split())
        lines.append(f"* **{name}**: {summary}")
    return "\n".join(lines) + "\n"
