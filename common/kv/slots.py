"""Which slots are given out, and how often each was."""


class SlotTable:
    """Slots 1 … slots − 1; slot 0 is never given out, padding rows point there.

    A slot's generation grows each time it is given out, so (slot, generation) names one tenancy. Taking back
    what is not given out raises RuntimeError.
    """

    def __init__(self, slots: int) -> None:
        if slots < 2:
            raise ValueError(f"a slot table needs 2 slots or more, got {slots}")
        self.slots = slots
        self._generations = [0] * slots
        self._given = [False] * slots
        self._free = list(range(slots - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def give(self) -> tuple[int, int] | None:
        """A slot and its new generation, or None when all are given out."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._given[slot] = True
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def take_back(self, slot: int) -> None:
        if not self._given[slot]:
            raise RuntimeError(f"slot {slot} is not given out")
        self._given[slot] = False
        self._free.append(slot)
