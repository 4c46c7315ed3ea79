import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.memory.arena import Arena, ArenaError, TensorSpec
from common.memory.cleanup import remove_dead_arenas

OWNER = """
import sys
from pathlib import Path
import torch
from common.memory.arena import Arena, TensorSpec
arena = Arena.create(service="target", incarnation=9, label="kv", access="write",
                     tensors={"kv": TensorSpec(torch.uint8, (64,))}, directory=Path(sys.argv[1]))
print(arena.path.name, flush=True)
sys.stdin.read()
"""


def make(directory: Path) -> Arena:
    tensors = {"kv": TensorSpec(torch.uint8, (64,))}
    return Arena.create(
        service="draft", incarnation=7, label="kv", tensors=tensors, access="write", directory=directory
    )


def leave_file(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o600)


def test_a_segment_is_removed_once_its_owner_was_killed_and_not_before(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert remove_dead_arenas(tmp_path) == ()
        assert (tmp_path / name).exists()
        owner.send_signal(signal.SIGKILL)
    assert remove_dead_arenas(tmp_path) == (name,)
    assert list(tmp_path.iterdir()) == []


def test_an_own_living_segment_is_kept(tmp_path: Path) -> None:
    with make(tmp_path) as arena:
        assert remove_dead_arenas(tmp_path) == ()
        assert arena.path.exists()


def test_a_reused_pid_does_not_keep_a_dead_segment_alive(tmp_path: Path) -> None:
    name = f"paceline-target-{os.getpid()}-0000000000000001-kv"
    leave_file(tmp_path / name)
    assert remove_dead_arenas(tmp_path) == (name,)


def test_files_that_are_not_segments_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    leave_file(target)
    leave_file(tmp_path / "paceline-target-1-1-kv")
    leave_file(tmp_path / "paceline-target-1-0000000000000001-kv.bak")
    (tmp_path / "paceline-target-1-0000000000000001-link").symlink_to(target)
    (tmp_path / "paceline-target-1-0000000000000001-directory").mkdir()
    os.mkfifo(tmp_path / "paceline-target-1-0000000000000001-fifo")
    before = sorted(tmp_path.iterdir())
    assert remove_dead_arenas(tmp_path) == ()
    assert sorted(tmp_path.iterdir()) == before


def test_a_segment_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_file(tmp_path / "paceline-target-1-0000000000000001-kv")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert remove_dead_arenas(tmp_path) == ()


def test_a_living_segment_that_took_the_place_of_a_dead_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cleaner was faster, and an owner made the segment anew, between this cleaner's open and its
    lock: the lock is that of a file that has no name any more."""
    name = f"paceline-draft-{os.getpid()}-0000000000000007-kv"
    leave_file(tmp_path / name)
    open_file, made = os.open, []

    def open_and_be_overtaken(path: Path, *arguments: int) -> int:
        fd = open_file(path, *arguments)
        monkeypatch.setattr(os, "open", open_file)
        os.unlink(path)
        made.append(make(tmp_path))
        return fd

    monkeypatch.setattr(os, "open", open_and_be_overtaken)
    assert remove_dead_arenas(tmp_path) == ()
    with made[0] as arena:
        assert arena.path == tmp_path / name
        assert arena.path.exists()


def test_an_arena_that_a_cleaner_took_at_birth_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, cleaned = os.open, []

    def open_and_be_cleaned(path: Path, *arguments: int) -> int:
        fd = create(path, *arguments)
        if not cleaned:
            cleaned.append(path)
            monkeypatch.setattr(os, "open", create)
            assert remove_dead_arenas(tmp_path) == (Path(path).name,)
        return fd

    monkeypatch.setattr(os, "open", open_and_be_cleaned)
    with make(tmp_path) as arena:
        assert cleaned == [arena.path]
        assert arena.path.exists()
        assert remove_dead_arenas(tmp_path) == ()


def test_an_arena_that_is_always_taken_fails_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.open

    def open_and_unlink(path: Path, *arguments: int) -> int:
        fd = create(path, *arguments)
        os.unlink(path)
        return fd

    monkeypatch.setattr(os, "open", open_and_unlink)
    with pytest.raises(ArenaError, match="removed by another process each time"):
        make(tmp_path)
