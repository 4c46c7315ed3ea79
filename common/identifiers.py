"""Random ids of epochs and incarnations."""

import secrets


def new_id() -> int:
    """63 random bits, never 0, which stands for none."""
    return secrets.randbits(63) or 1
