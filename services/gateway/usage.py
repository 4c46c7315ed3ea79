"""How busy the two services' devices are, and how much of the time rounds take."""

from collections import Counter, deque

from common.messages.lifecycle import Heartbeat

WINDOW_S = 10.0


class Usage:
    """Times in seconds since the gateway began. target_busy_s: of the rounds whose verdict came.
    draft_busy_s: as the draft's heartbeats tell it. rounds_s: while at least one round was outstanding.
    hidden_rounds: how many verdicts said rows or no_rows of the hidden rows that were asked for."""

    def __init__(self) -> None:
        self.target_busy_s = 0.0
        self.draft_busy_s = 0.0
        self.rounds_s = 0.0
        self.hidden_rounds: Counter[str] = Counter()
        self._outstanding_since: float | None = None
        self._draft = 0
        self._draft_us = 0
        self._samples: deque[tuple[float, float, float]] = deque()

    def target_worked(self, elapsed_s: float) -> None:
        self.target_busy_s += elapsed_s

    def draft_beats(self, beat: Heartbeat) -> None:
        if beat.incarnation != self._draft:
            self._draft, self._draft_us = beat.incarnation, 0
        known_us, self._draft_us = self._draft_us, max(self._draft_us, beat.device_us)
        self.draft_busy_s += (self._draft_us - known_us) * 1e-6

    def rounds_are(self, outstanding: bool, now: float) -> None:
        """Told after every event whether a round is outstanding from now on."""
        if self._outstanding_since is not None:
            self.rounds_s += now - self._outstanding_since
        self._outstanding_since = now if outstanding else None

    def sample(self, now: float) -> None:
        """Once per heartbeat: the window moves on."""
        self._samples.append((now, self.target_busy_s, self.draft_busy_s))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def idle_ratios(self) -> dict[str, float]:
        """By service: the share of the last WINDOW_S in which its device had nothing to do, 0 to 1."""
        if len(self._samples) < 2:
            return {"target": 1.0, "draft": 1.0}
        first, last = self._samples[0], self._samples[-1]
        span_s = max(last[0] - first[0], 1e-9)
        target, draft = ((last[i] - first[i]) / span_s for i in (1, 2))
        return {"target": max(0.0, 1.0 - target), "draft": max(0.0, 1.0 - draft)}
