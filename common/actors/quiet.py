"""Logging of what a peer can cause at will."""

import logging
import time

INTERVAL_S = 5.0


class QuietLog:
    """At most one warning per interval; the next one says how many were left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = 0.0
        self._left_out = 0

    def warning(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            self._left_out += 1
            return
        self._next_s = now_s + INTERVAL_S
        suffix = f" (and {self._left_out} more like it)" if self._left_out else ""
        self._left_out = 0
        self._log.warning("%s%s", text, suffix)
