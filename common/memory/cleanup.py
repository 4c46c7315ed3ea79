"""Removing what dead processes left in the shared-memory directory."""

import os
import stat
from pathlib import Path

from common.memory.segment import DEFAULT_DIRECTORY, parse_segment_name, still_named, take_lock_of_the_dead


def remove_dead_arenas(directory: Path = DEFAULT_DIRECTORY) -> tuple[str, ...]:
    """Unlink this user's segments whose owner is gone; returns their names, sorted.

    A segment whose owner lives is never touched: the owner holds a lock on it that no one else can take.
    """
    return tuple(
        name
        for name in sorted(os.listdir(directory))
        if parse_segment_name(name) is not None and _remove_if_dead(directory / name)
    )


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if not take_lock_of_the_dead(fd) or not still_named(fd, path):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)
