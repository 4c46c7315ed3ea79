"""What an operator may set of the ZeroMQ front, and where it may listen."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.wire import MAX_MESSAGE_BYTES
from services.gateway.loopback import is_loopback

MAX_IPC_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class ZmqSettings:
    """heartbeat_s: between heartbeats of a client, which is given up after MISSED_HEARTBEATS without a word.
    max_clients, max_requests: clients at once, and live requests of one. max_message_bytes: a client that
    sends a larger frame is disconnected.
    """

    heartbeat_s: float = 2.0
    max_clients: int = 256
    max_requests: int = 128
    max_message_bytes: int = MAX_MESSAGE_BYTES


class AddressRefused(ValueError):
    """An address that the front must not or cannot listen on."""


def check_address(address: str) -> None:
    """Raises AddressRefused unless `address` is ipc://PATH or tcp:// on loopback with a port."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        length = len(rest.encode())
        if length > MAX_IPC_PATH_BYTES:
            raise AddressRefused(
                f"{address!r}: the path has {length} bytes, a socket's path at most {MAX_IPC_PATH_BYTES}: "
                "choose a shorter directory"
            )
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > 65535:
        raise AddressRefused(f"{address!r} is not an address: give tcp://127.0.0.1:PORT or ipc://PATH")
    if not is_loopback(host):
        raise AddressRefused(
            f"{address!r} is reachable from other machines, and the ZeroMQ front has no keys: "
            f"bind to tcp://127.0.0.1:{port} or ipc://PATH, and serve other machines over HTTP"
        )
