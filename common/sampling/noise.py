"""Gumbel noise as a pure function of (seed, position, token id): the same bits alone, in any batch, in any
process of one machine.

The noise is the negative logarithm of a race in which every id arrives after an exponential time of rate 1.
Ids run in blocks of 64. The first of a block arrives after an exponential time of rate 64; it is any of them
with equal chance; and because exponentials have no memory every other one takes a further exponential time of
rate 1. So the noise of each id is independent of the others', yet one hash per block bounds all of its ids.
(Top-down construction: Maddison, Tarlow, Minka, "A* Sampling", 2014. Hash: SplitMix64.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 64
_BLOCK_BITS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A, _MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BLOCK_STREAM, _ID_STREAM = 0x6A09E667F3BCC908, 0xBB67AE8584CAA73B
"""Fractions of √2 and √3: keep the two streams of a position apart."""

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def gumbel(seed: int, position: int, ids: Ids) -> Floats:
    """Standard Gumbel noise of token ids at an absolute position. ids: any shape [n], in any order.

    seed: 64 bits are used. position ≥ 0.
    """
    key = _key(seed, position)
    first, winner = _blocks(key, ids >> _BLOCK_BITS)
    behind = -np.log(_unit(_hash(_mix(key ^ _ID_STREAM), ids)))
    behind[(ids & (BLOCK - 1)) == winner] = 0.0
    noise: Floats = -np.log(first + behind)
    return noise


def block_gumbel(seed: int, position: int, blocks: int) -> Floats:
    """The largest noise in each of the first blocks of 64 ids, but for rounding. float64 [blocks]"""
    first, _ = _blocks(_key(seed, position), np.arange(blocks, dtype=np.int64))
    noise: Floats = -np.log(first)
    return noise


def _blocks(key: int, blocks: Ids) -> tuple[Floats, Ids]:
    """Time of the first arrival in each block, and which of its ids that is."""
    hashed = _hash(_mix(key ^ _BLOCK_STREAM), blocks)
    return np.log(_unit(hashed)) / -BLOCK, (hashed & np.uint64(BLOCK - 1)).view(np.int64)


def _unit(hashed: npt.NDArray[np.uint64]) -> Floats:
    """Uniform on the open interval (0, 1), from the upper 52 bits: values are exact, none is 0 or 1."""
    return ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _key(seed: int, position: int) -> int:
    return _mix(_mix(seed & _MASK) + position * _GOLDEN & _MASK)


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * _MIX_A & _MASK
    value = (value ^ value >> 27) * _MIX_B & _MASK
    return value ^ value >> 31


def _hash(key: int, counters: Ids) -> npt.NDArray[np.uint64]:
    """Outputs number `counters` of a SplitMix64 generator started at key."""
    value: Any = counters.astype(np.uint64) + np.uint64(1)
    value *= np.uint64(_GOLDEN)
    value += np.uint64(key)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MIX_A)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MIX_B)
    value ^= value >> np.uint64(31)
    return value  # type: ignore[no-any-return]
