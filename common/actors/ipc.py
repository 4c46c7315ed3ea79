"""Addresses of sockets between services: `ipc://` files in a directory that only their user may enter."""

import os
import socket
import stat
from pathlib import Path

MAX_PATH_BYTES = 107  # sun_path of a Unix socket holds 108, the last one a NUL


class AddressError(Exception):
    """An address that a service must not or cannot use; the message says what to do."""


def socket_path(address: str) -> Path:
    """The file of an address like `ipc:///run/paceline/target.sock`. Raises AddressError."""
    path = address.removeprefix("ipc://")
    if path == address or not path.startswith("/"):
        raise AddressError(f"address {address!r} must be ipc:// followed by an absolute path")
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise AddressError(
            f"socket path {path!r} has {size} bytes, the limit is {MAX_PATH_BYTES}; "
            "set a shorter run directory"
        )
    return Path(path)


def prepare_bind(address: str) -> Path:
    """Make the socket's directory (mode 0700) if it is missing, and remove the socket of a dead process.

    Raises AddressError if others may enter the directory, if a living process listens on the address, or if
    something that is not a socket stands there.
    """
    path = socket_path(address)
    _check_directory(path.parent)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return path
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"{path} exists and is not a socket; remove it or set another run directory")
    if _is_listening(path):
        raise AddressError(f"another process listens on {address}; stop it or set another run directory")
    path.unlink(missing_ok=True)
    return path


def _check_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise AddressError(f"run directory {directory} cannot be made: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        raise AddressError(
            f"run directory {directory} belongs to uid {status.st_uid}, this process to {os.geteuid()}; "
            "run all services as one user or set another run directory"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise AddressError(
            f"run directory {directory} has mode {stat.S_IMODE(status.st_mode):04o}, others may enter it; "
            "chmod 700 it or set another run directory"
        )


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog is full, so someone holds it
            return True
    return True
