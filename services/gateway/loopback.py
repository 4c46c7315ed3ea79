"""Whether an address stays on this machine; every front asks before it binds."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """host: an IP address, in brackets or not; anything else, a name too, is not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
