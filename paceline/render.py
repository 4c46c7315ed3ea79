"""What the command line shows of a generation: its text, the draft's share in colour, and its numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import cycle
from typing import TextIO

from paceline.wire import Chunk, Final

DRAFT_COLOUR = "\x1b[32m"
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"


def wants_colour(out: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Colour goes to a terminal that knows it, unless NO_COLOR is set (https://no-color.org)."""
    return out.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Painter:
    """Writes text as it comes; with colour, what accepted draft tokens gave is DRAFT_COLOUR."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self._out = out
        self._colour = colour

    def chunk(self, chunk: Chunk) -> None:
        self._out.write(painted(chunk) if self._colour else chunk.text)
        self._out.flush()

    def note(self, text: str) -> None:
        """A line of its own that is not part of an answer."""
        self._out.write(f"{DIM}{text}{PLAIN}\n" if self._colour else f"{text}\n")
        self._out.flush()


def painted(chunk: Chunk) -> str:
    parts, start = [], 0
    for length, from_draft in zip(chunk.spans, cycle((False, True)), strict=False):
        text = chunk.text[start : start + length]
        start += length
        if text:
            parts.append(f"{DRAFT_COLOUR}{text}{PLAIN}" if from_draft else text)
    return "".join(parts) + chunk.text[start:]


def summary(final: Final) -> str:
    """Tokens per second from the moment the request left the queue, and mean committed tokens per step."""
    tokens = final.usage.completion
    ran_s = final.timings.total_s - final.timings.queue_s
    parts = [
        f"{tokens} tokens",
        f"{tokens / ran_s:.1f} tokens/s" if ran_s > 0 else "",
        f"{tokens / final.spec.steps:.2f} tokens per step" if final.spec.steps else "",
        f"{final.spec.accepted} of {final.spec.drafted} drafted accepted" if final.spec.drafted else "",
        f"ended by {final.finish_reason}",
    ]
    return " · ".join(part for part in parts if part)


def statistics(final: Final) -> str:
    """Everything that a Final tells, one item a line."""
    usage, spec, timings = final.usage, final.spec, final.timings
    stopped_by = "" if final.stop_reason is None else f" ({final.stop_reason!r})"
    lines = [
        summary(final) + stopped_by,
        f"seed {final.seed}",
        f"prompt {usage.prompt} tokens, {usage.cached} of them cached",
        f"queued {timings.queue_s:.3f} s, first token after {timings.first_token_s:.3f} s, "
        f"all after {timings.total_s:.3f} s",
        f"{spec.steps} steps; steps by accepted draft tokens: "
        + (" ".join(f"{j}:{steps}" for j, steps in enumerate(spec.histogram)) or "none"),
    ]
    return "\n".join(lines)
