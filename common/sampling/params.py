"""Sampling parameters of one request, fixed at admission."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the token at each position is chosen.

    temperature: 0 is argmax, ties to the lowest id.
    top_k: 0 is off.  top_p: 1.0 is off.  min_p: 0.0 is off.
    seed: unsigned 64-bit key of the noise; always set (drawn by the gateway when a client gives none).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
