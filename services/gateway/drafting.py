"""When a draft that misses rounds is left alone, and when it is asked again."""

from common.messages.lifecycle import Heartbeat
from services.gateway.options import CoordinatorOptions


class DraftPause:
    """After draft_misses rounds that waited for nothing, k is 0 for a pause that doubles, and until the draft
    has finished something since and is free."""

    def __init__(self, options: CoordinatorOptions) -> None:
        self._options = options
        self._misses = 0
        self._pause_s = options.draft_pause_s
        self._until = 0.0
        self._rounds_before = -1

    def observe(self, word: str, now: float, beat: Heartbeat | None) -> None:
        """word: Verdict.draft of a round. beat: the draft's last heartbeat."""
        if word == "used":
            self._misses = 0
            self._pause_s = self._options.draft_pause_s
        elif word in ("absent", "late"):
            self._misses += 1
            if self._misses >= self._options.draft_misses:
                self._misses = 0
                self._until = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, self._options.draft_pause_max_s)
                self._rounds_before = beat.rounds if beat else 0

    def paused(self, now: float, beat: Heartbeat | None) -> bool:
        if self._rounds_before < 0:
            return False
        if now < self._until or beat is None or beat.busy or beat.rounds <= self._rounds_before:
            return True
        self._rounds_before = -1
        return False
