"""Hidden rows of the toy model: blocks that know what they hold, and who has read it."""

from dataclasses import dataclass, field

from toy_model import Cell, Violation, chain_of

from services.draft.work import DraftRow


@dataclass
class RowBuffer:
    """The blocks of one draft's region. written: round and rows by block. read: what was read once."""

    written: dict[int, tuple[int, list[Cell]]] = field(default_factory=dict)
    read: set[tuple[int, int, int]] = field(default_factory=set)

    def write(self, block: int, round_: int, rows: list[Cell]) -> None:
        self.written[block] = round_, rows

    def check(self, row: DraftRow) -> int:
        """How many rows this work reads for a slot, each the state behind the slot's own ids."""
        count = 0
        for hidden in row.hidden:
            round_, rows = self.written.get(hidden.block, (0, []))
            if round_ != hidden.round:
                raise Violation(
                    f"block {hidden.block} of round {hidden.round} is read and holds round {round_}"
                )
            if (hidden.block, round_, row.slot) in self.read:
                raise Violation(f"slot {row.slot} of block {hidden.block} is read twice in round {round_}")
            self.read.add((hidden.block, round_, row.slot))
            if hidden.count < 1 or hidden.first + hidden.count > len(rows):
                raise Violation(f"{hidden} reaches past the {len(rows)} rows of its block")
            for offset in range(hidden.count):
                position = hidden.start + offset
                due = Cell(row.key, position, row.ids[position], chain_of(row.ids[: position + 1]))
                if rows[hidden.first + offset] != due or position + 1 >= len(row.ids):
                    raise Violation(f"row of {row.key} holds {rows[hidden.first + offset]}, due was {due}")
            count += hidden.count
        return count
