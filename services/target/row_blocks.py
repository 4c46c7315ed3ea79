"""Which blocks of hidden rows the draft may still read."""

from common.messages.rounds import hidden_block


class RowBlocks:
    """A block is written once and then left alone until the draft has consumed it or is gone."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, int]] = {}

    def is_free(self, group: int, round_: int) -> bool:
        return hidden_block(group, round_) not in self._written

    def write(self, group: int, round_: int) -> None:
        self._written[hidden_block(group, round_)] = group, round_

    def consumed(self, group: int, round_: int) -> None:
        """The draft reads nothing of this group any more that was written in this round or before."""
        for block, (of_group, written) in list(self._written.items()):
            if of_group == group and written <= round_:
                del self._written[block]

    def draft_gone(self) -> None:
        self._written.clear()
