"""What libzmq knows about the connections of one socket."""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


class ConnectionMonitor:
    """Calls on_connected when a peer has shaken hands and on_disconnected when a connection ends."""

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        self._watched = watched
        self._loop = asyncio.get_running_loop()
        self._on_event = {
            int(zmq.EVENT_HANDSHAKE_SUCCEEDED): on_connected,
            int(zmq.EVENT_DISCONNECTED): on_disconnected,
        }
        self._socket = watched.get_monitor_socket(_EVENTS)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)
        self._loop.call_soon(self.drain)  # the first event gives no signal until somebody has tried to read

    def drain(self) -> None:
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            handler = self._on_event.get(int(parse_monitor_message(frames)["event"]))
            if handler is not None:
                handler()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._watched.disable_monitor()
            self._socket.close(linger=0)
