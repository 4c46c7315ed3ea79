"""How much memory this process may still take: of the machine, of its control groups, of a tmpfs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 62
"""A limit from here on is none: version 1 writes the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes, and what set the bound: "the machine" or the path of a control group."""

    bytes: int
    bound: str


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> FreeMemory:
    """The smaller of what the machine has available and what the control groups of this process leave.

    Page cache counts as free: it gives way. Linux; control groups of either version, any of which may be
    absent.
    """
    available = FreeMemory(_meminfo(proc / "meminfo", "MemAvailable"), "the machine")
    return min(
        (available, *(_left_by(group) for group in _groups(proc, cgroups))), key=lambda free: free.bytes
    )


def free_in_directory(directory: Path) -> int:
    """Bytes that files in it may still take."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def resident_bytes(proc: Path = PROC) -> int:
    """Of this process, pages that it shares with others included."""
    pages = int((proc / "self" / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _meminfo(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise OSError(f"{path} has no line {key}")


@dataclass(frozen=True, slots=True)
class _Group:
    """A directory of a memory control group, and what its files are called."""

    path: Path
    limit: str
    usage: str
    cache: str


def _groups(proc: Path, cgroups: Path) -> Iterator[_Group]:
    """Those that this process is in, its own and the ones around it. Inside a container the outer ones are
    out of sight and the path of its own may lead nowhere: then the root of what is mounted is its own."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(cgroups, path):
                yield _Group(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroups / "memory", path):
                yield _Group(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _left_by(group: _Group) -> FreeMemory:
    try:
        limit = (group.path / group.limit).read_text().strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return FreeMemory(UNLIMITED, str(group.path))
        usage = int((group.path / group.usage).read_text())
        cache = 0
        for line in (group.path / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == group.cache:
                cache = int(value)
    except FileNotFoundError:
        return FreeMemory(UNLIMITED, str(group.path))
    return FreeMemory(max(0, int(limit) - usage + cache), str(group.path))
