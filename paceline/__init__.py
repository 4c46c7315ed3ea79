"""Client of a Paceline server: `Client` (blocking) and `AsyncClient` (asyncio), over ZeroMQ."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.client import AsyncClient, AsyncStream, Completion
    from paceline.errors import (
        ConnectionLost,
        InvalidRequest,
        Overloaded,
        PacelineError,
        RequestTimeout,
        ServerError,
        Unavailable,
    )
    from paceline.sync import Client, Stream
    from paceline.wire import Chunk, Final, ModelInfo, SpecStats, Timings, Usage

__version__ = "0.1.0"

DEFAULT_ADDRESS = "tcp://127.0.0.1:8001"
"""Where `make serve` listens for clients."""

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "ConnectionLost",
    "Final",
    "InvalidRequest",
    "ModelInfo",
    "Overloaded",
    "PacelineError",
    "RequestTimeout",
    "ServerError",
    "SpecStats",
    "Stream",
    "Timings",
    "Unavailable",
    "Usage",
    "__version__",
]

_HOME = {
    "AsyncClient": "client",
    "AsyncStream": "client",
    "Completion": "client",
    "Client": "sync",
    "Stream": "sync",
    "ConnectionLost": "errors",
    "InvalidRequest": "errors",
    "Overloaded": "errors",
    "PacelineError": "errors",
    "RequestTimeout": "errors",
    "ServerError": "errors",
    "Unavailable": "errors",
    "Chunk": "wire",
    "Final": "wire",
    "ModelInfo": "wire",
    "SpecStats": "wire",
    "Timings": "wire",
    "Usage": "wire",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the command line answers --help without loading ZeroMQ.
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"paceline.{_HOME[name]}"), name)
    globals()[name] = value
    return value
