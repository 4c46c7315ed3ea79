import os
import socket
from pathlib import Path

import pytest

from common.actors.ipc import AddressError, prepare_bind, socket_path


def leave_stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory


def test_a_path_of_107_bytes_is_the_longest() -> None:
    longest = "/" + "é" * 53
    assert len(longest.encode()) == 107
    assert socket_path(f"ipc://{longest}") == Path(longest)
    with pytest.raises(AddressError, match=r"has 108 bytes, the limit is 107; set a shorter run directory"):
        socket_path(f"ipc://{longest}x")


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:80", "ipc://relative.sock", "ipc://*", "ipc://@abstract", "/x"]
)
def test_only_files_at_absolute_paths_are_addresses(address: str) -> None:
    with pytest.raises(AddressError, match="must be ipc:// followed by an absolute path"):
        socket_path(address)


def test_a_missing_run_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        prepare_bind(f"ipc://{tmp_path}/run/a.sock")
    finally:
        os.umask(previous)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_others_may_enter_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    with pytest.raises(AddressError, match=r"has mode 0755, others may enter it; chmod 700 it"):
        prepare_bind(f"ipc://{run_dir}/a.sock")


def test_a_run_directory_that_cannot_be_made_is_named(run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    with pytest.raises(AddressError, match=r"file/sub cannot be made"):
        prepare_bind(f"ipc://{run_dir}/file/sub/a.sock")


def test_the_socket_of_a_dead_process_is_removed(run_dir: Path) -> None:
    leave_stale_socket(run_dir / "a.sock")
    prepare_bind(f"ipc://{run_dir}/a.sock")
    assert not (run_dir / "a.sock").exists()


def test_the_socket_of_a_living_process_is_left_alone(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(run_dir / "a.sock"))
        alive.listen(1)
        with pytest.raises(AddressError, match="another process listens on"):
            prepare_bind(f"ipc://{run_dir}/a.sock")
    assert (run_dir / "a.sock").exists()


def test_something_that_is_not_a_socket_is_left_alone(run_dir: Path) -> None:
    (run_dir / "a.sock").write_text("precious")
    with pytest.raises(AddressError, match="is not a socket"):
        prepare_bind(f"ipc://{run_dir}/a.sock")
    assert (run_dir / "a.sock").read_text() == "precious"
