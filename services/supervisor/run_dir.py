"""The directory of a stack's sockets: one of its own, or the one that the settings name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.settings import default_run_dir

PREFIX = "paceline-run-"
LOCK = "lock"


@contextlib.contextmanager
def run_directory(setting: str) -> Iterator[Path]:
    """A private directory that goes when the block ends, or the one that was asked for, which stays."""
    if setting != default_run_dir():
        path = Path(setting)
        try:
            yield path
        finally:
            for left in (*path.glob("*.sock"), *path.glob("*.alive")):
                left.unlink(missing_ok=True)
        return
    remove_dead_directories(Path(tempfile.gettempdir()))
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_dead_directories(parent: Path) -> None:
    """Remove this user's directories whose stack was killed: nobody holds their lock any more."""
    for path in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.geteuid() and _is_dead(path / LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_dead(lock: Path) -> bool:
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
