"""The numeric plan of the last start, kept on disk so that a change is noticed and said."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from common.model.catalog import cache_home
from common.model.plan import NumericPlan


def plan_file(model: str, weights: str) -> Path:
    """model: its name or path, as it was asked for. weights: bf16, int4 or auto."""
    name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in f"{model}-{weights}")
    return cache_home() / "plans" / f"{name[-200:]}.json"


def changes_since_last_start(file: Path, plan: NumericPlan) -> list[str]:
    """What differs from the plan kept in file, a field each, 'name: then → now'; nothing if none is kept.

    plan is kept in its place; a directory that cannot be written keeps none.
    """
    changes = _differences(_kept(file), plan)
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(plan)))
        os.replace(name, file)
    return changes


def _kept(file: Path) -> NumericPlan | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=NumericPlan)
    except (OSError, msgspec.DecodeError):
        return None


def _differences(then: NumericPlan | None, now: NumericPlan) -> list[str]:
    if then is None:
        return []
    before, after = msgspec.to_builtins(then), msgspec.to_builtins(now)
    return [f"{name}: {before[name]} → {after[name]}" for name in after if before[name] != after[name]]
