"""Which rows of a proposal may be verified. Everything that a draft says is checked here; what fails is
absent."""

from collections.abc import Mapping

from common.messages.rounds import Proposal, ProposalRow
from services.target.slots import Slot


def fault(row: ProposalRow, slot: Slot, nodes: int, vocab_size: int) -> str | None:
    """Why this row cannot be verified for this slot, or None. nodes: most nodes, root included."""
    tokens, parents = row.tokens, row.parents
    if row.request != slot.request or row.generation != slot.generation:
        return "generation"
    if row.base != len(slot.ids):
        return "base"
    if not 1 <= len(tokens) <= nodes or len(parents) != len(tokens):
        return "nodes"
    if tokens[0] != slot.ids[-1]:
        return "root"
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return "vocabulary"
    if parents[0] != -1 or any(not 0 <= parent < j for j, parent in enumerate(parents) if j):
        return "parents"
    return None


def usable_rows(
    proposal: Proposal, verifying: Mapping[int, Slot], nodes: int, vocab_size: int
) -> tuple[dict[int, ProposalRow], list[str]]:
    """Rows by slot that may be verified, the first of a slot only, and the faults of the others."""
    usable: dict[int, ProposalRow] = {}
    faults: list[str] = []
    for row in proposal.rows:
        slot = verifying.get(row.slot)
        if slot is None:
            faults.append("slot")
        elif row.slot in usable:
            faults.append("twice")
        elif reason := fault(row, slot, nodes, vocab_size):
            faults.append(reason)
        else:
            usable[row.slot] = row
    return usable, faults
