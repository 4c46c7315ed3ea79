from pathlib import Path

import pytest

from common.settings import default_run_dir
from services.supervisor import run_dir
from services.supervisor.run_dir import remove_dead_directories, run_directory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir.tempfile, "tempdir", str(tmp_path))


def test_a_directory_of_its_own_is_private_and_goes_with_the_stack(tmp_path: Path) -> None:
    with run_directory(default_run_dir()) as path:
        (path / "gateway.sock").touch()
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_stack_left_is_removed_and_a_living_stack_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "paceline-run-dead"
    dead.mkdir()
    (dead / "lock").touch()
    with run_directory(default_run_dir()) as living:
        remove_dead_directories(tmp_path)
        assert not dead.exists()
        assert living.exists()


def test_the_directory_that_was_asked_for_is_used_and_left_empty(tmp_path: Path) -> None:
    asked = tmp_path / "mine"
    asked.mkdir()
    (asked / "note").touch()
    with run_directory(str(asked)) as path:
        assert path == asked
        (path / "target.alive").touch()
    assert [left.name for left in asked.iterdir()] == ["note"]
