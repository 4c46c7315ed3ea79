"""What an operator may set of the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.loopback import is_loopback

MAX_BODY_BYTES = 4 * 2**20
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """version: what /version tells. api_keys: any of them opens the server; none means that it is open.
    open_metrics: /metrics needs no key. max_body_bytes: larger request bodies are refused with 413.
    max_choices: most prompts × n of one request.
    """

    version: str
    api_keys: tuple[str, ...] = ()
    open_metrics: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    max_choices: int = MAX_CHOICES


class ExposedWithoutKey(ValueError):
    """The server would answer anyone on the network."""


def check_exposure(host: str, api_keys: tuple[str, ...]) -> None:
    """Raises ExposedWithoutKey if `host` reaches beyond loopback and no key guards it."""
    if not api_keys and host != "localhost" and not is_loopback(host):
        raise ExposedWithoutKey(
            f"host {host!r} is reachable from other machines and no API key is set: "
            "give --api-key KEY (or PACELINE_API_KEY), or bind to 127.0.0.1"
        )
