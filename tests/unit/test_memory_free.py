"""What a process may still take: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.memory.free import UNLIMITED, free_in_directory, free_memory, resident_bytes

MIB = 1 << 20
MACHINE = 8000 * MIB


@dataclass
class Machine:
    """Files of a made-up machine whose MemAvailable is MACHINE."""

    root: Path

    def __post_init__(self) -> None:
        self.proc, self.cgroups = self.root / "proc", self.root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            f"MemTotal:       16000000 kB\nMemFree: 1 kB\nMemAvailable:   {MACHINE // 1024} kB\n"
        )
        self.is_in("0::/")

    def is_in(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(line + "\n" for line in lines))

    def group(self, path: str, limit: str, usage: int, inactive: int = 0) -> None:
        """Of version 2."""
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")

    def old_group(self, path: str, limit: int, usage: int, inactive: int = 0) -> None:
        """Of version 1."""
        folder = self.cgroups / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")

    def free(self) -> tuple[int, str]:
        free = free_memory(self.proc, self.cgroups)
        return free.bytes, free.bound


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_it_is_what_the_machine_has_available(machine: Machine) -> None:
    assert machine.free() == (MACHINE, "the machine")


def test_a_group_leaves_its_limit_less_what_is_used_but_for_page_cache(machine: Machine) -> None:
    machine.group("", str(1000 * MIB), 700 * MIB, 200 * MIB)
    assert machine.free() == (500 * MIB, str(machine.cgroups))


def test_a_group_without_a_limit_bounds_nothing(machine: Machine) -> None:
    machine.group("", "max", 700 * MIB)
    assert machine.free() == (MACHINE, "the machine")


def test_the_machine_bounds_a_group_with_a_larger_limit(machine: Machine) -> None:
    machine.group("", str(2 * MACHINE), 0)
    assert machine.free() == (MACHINE, "the machine")


def test_the_tightest_of_the_groups_around_a_process_counts(machine: Machine) -> None:
    machine.is_in("0::/slice/service")
    machine.group("slice", str(600 * MIB), 500 * MIB)
    machine.group("slice/service", str(400 * MIB), 100 * MIB)
    assert machine.free() == (100 * MIB, str(machine.cgroups / "slice"))


def test_a_path_that_leads_nowhere_inside_a_container_means_the_mounted_root(machine: Machine) -> None:
    machine.is_in("0::/host/only")
    machine.group("", str(300 * MIB), 100 * MIB)
    assert machine.free() == (200 * MIB, str(machine.cgroups))


def test_a_group_of_version_1_counts_alike(machine: Machine) -> None:
    machine.is_in("7:cpu,cpuacct:/a", "4:memory:/box", "0::/")
    machine.old_group("", 9223372036854771712, 1)
    machine.old_group("box", 1000 * MIB, 900 * MIB, 50 * MIB)
    assert machine.free() == (150 * MIB, str(machine.cgroups / "memory" / "box"))
    assert UNLIMITED < 9223372036854771712


def test_a_group_that_is_over_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.group("", str(100 * MIB), 200 * MIB)
    assert machine.free()[0] == 0


def test_this_machine_can_be_asked() -> None:
    assert free_memory().bytes > 0


def test_a_directory_has_what_its_file_system_has(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    assert free_in_directory(tmp_path) == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_bytes()
    # Memory of its own: an allocator may hand out what it has touched before.
    with mmap.mmap(-1, 32 * MIB) as fresh:
        fresh.write(b"x" * (32 * MIB))
        assert 31 * MIB < resident_bytes() - before < 96 * MIB
