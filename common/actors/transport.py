"""The sockets of a service: a ROUTER that others connect to, a DEALER that connects."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import zmq

from common.actors import frames, ipc
from common.actors.endpoint import Endpoint, Limits
from common.actors.remote import RemoteRef

In = TypeVar("In")


def _ignore_peer(peer: str) -> None:
    pass


def _ignore() -> None:
    pass


class RouterEndpoint(Endpoint[In]):
    """Binds; speaks with any number of peers, each named by the identity that it gave itself.

    accepts: a msgspec type or union, what peers may send. on_message(peer, message): should `tell` an actor;
    Undeliverable out of it is counted. on_question(peer, message): its value goes back as the answer; None
    refuses questions. on_peer_lost(peer): a send found the peer gone, or its queue full; called on the loop
    after the send returned, once for each such send. Raises AddressError, TransportError.
    """

    def __init__(
        self,
        address: str,
        *,
        accepts: Any,
        on_message: Callable[[str, In], None],
        on_question: Callable[[str, In], Awaitable[object]] | None = None,
        on_peer_lost: Callable[[str], None] = _ignore_peer,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(address, accepts, on_message, on_question, limits or Limits())
        self._on_peer_lost = on_peer_lost
        self._path = ipc.prepare_bind(address)
        self._open(zmq.ROUTER, {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1})

    def send(self, peer: str, message: object) -> bool:
        """False if the peer is not connected or does not read; then on_peer_lost is called too.
        Raises TransportError for a message over the size limit."""
        return self._send(peer, self._told(message))

    def ref(self, peer: str) -> RemoteRef[Any]:
        """A reference to the peer of this identity; it need not be connected yet."""
        return self._ref(peer)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _attach(self) -> None:
        self._socket.bind(self.address)

    def _split(self, received: list[bytes]) -> tuple[str, list[bytes]]:
        return frames.parse_identity(received[0]), received[1:]

    def _route(self, peer: str) -> list[bytes]:
        return [peer.encode("ascii")]

    def _on_refused(self, peer: str) -> None:
        self._questions.lose(peer)
        self._loop.call_soon(self._on_peer_lost, peer)


class DealerEndpoint(Endpoint[In]):
    """Connects, and again whenever the other side comes back; nothing is queued while it is away.

    identity: of this process, from `frames.identity`. accepts, on_message(message), on_question(message): as
    with RouterEndpoint. on_connected(), on_lost(): the connection stands or ended (or its queue is full).
    connected says which of them came last. Raises AddressError, TransportError.
    """

    def __init__(
        self,
        address: str,
        identity: str,
        *,
        accepts: Any,
        on_message: Callable[[In], None],
        on_question: Callable[[In], Awaitable[object]] | None = None,
        on_connected: Callable[[], None] = _ignore,
        on_lost: Callable[[], None] = _ignore,
        limits: Limits | None = None,
    ) -> None:
        def answer(_: str, message: In) -> Awaitable[object]:
            assert on_question is not None
            return on_question(message)

        super().__init__(
            address,
            accepts,
            lambda _, message: on_message(message),
            None if on_question is None else answer,
            limits or Limits(),
        )
        frames.parse_identity(identity.encode())
        self.connected = False
        self._tell_connected = on_connected
        self._tell_lost = on_lost
        ipc.socket_path(address)
        # IMMEDIATE: without a connection a send is refused at once, where it would be kept for whoever
        # listens there next.
        options: dict[int, int | bytes] = {
            zmq.ROUTING_ID: identity.encode("ascii"),
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: 50,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        self._open(zmq.DEALER, options)

    def send(self, message: object) -> bool:
        """False if the other side is not connected or does not read.
        Raises TransportError for a message over the size limit."""
        return self._send(self.address, self._told(message))

    def ref(self) -> RemoteRef[Any]:
        """A reference to whatever listens at the address."""
        return self._ref(self.address)

    def _attach(self) -> None:
        self._socket.connect(self.address)

    def _split(self, received: list[bytes]) -> tuple[str, list[bytes]]:
        return self.address, received

    def _route(self, peer: str) -> list[bytes]:
        return []

    def _on_connected(self) -> None:
        super()._on_connected()
        self.connected = True
        self._tell_connected()

    def _on_disconnected(self) -> None:
        super()._on_disconnected()
        self._lose()

    def _on_refused(self, peer: str) -> None:
        # A full queue: the other side does not read. A new connection drops what it would find there later.
        if self.connected:
            self._socket.disconnect(self.address)
            self._socket.connect(self.address)
            self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if self.connected:
            self.connected = False
            self._questions.lose_all()
            self._tell_lost()
