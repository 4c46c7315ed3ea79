"""Temperature, top-k, top-p and min-p over one row of logits.

Tokens are ordered by (logit descending, id ascending); every filter keeps a prefix of that order, so ties at
a cut go to the lower id. Temperature comes first; top-k keeps exactly k; top-p keeps the fewest of those
whose probability, renormalised over them, reaches p; min-p keeps those at least min_p times as probable as
the first. Probabilities are summed in float64 in a fixed order, so the cut is a function of the row alone.

A row is not sorted whole: first a threshold is found above which the answer provably lies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common.sampling.noise import BLOCK, Floats, Ids
from common.sampling.params import SamplingParams

Logits = npt.NDArray[np.float32]

NUCLEUS_DEPTHS = (4.0, 8.0, 16.0, 32.0)
"""How far below the largest scaled logit top-p looks, by turns, before it looks at the whole row."""


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Any of top-k, top-p, min-p can drop a token."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def survivors(logits: Logits, params: SamplingParams) -> tuple[Ids, Floats]:
    """Ids that the filters keep, in order, and their scaled logits (logit − largest logit) / temperature.

    logits: float32 [vocab], the largest finite, no NaN. temperature > 0.
    """
    top = logits.max()
    if 0 < params.top_k < len(logits):
        ids = _in_order(logits, _above(logits, _top_k_threshold(logits, params.top_k)))[: params.top_k]
        scaled = scale(logits[ids], top, params.temperature)
        if params.top_p < 1.0:
            mass = np.cumsum(np.exp(scaled))
            kept = _reaching(mass, params.top_p * mass[-1])
            ids, scaled = ids[:kept], scaled[:kept]
    elif params.top_p < 1.0:
        ids, scaled = _nucleus(logits, top, params)
    else:
        threshold = np.log(params.min_p) - 1e-6 if params.min_p < 1.0 else -1e-6
        ids = _in_order(logits, _above(scale(logits, top, params.temperature), threshold))
        scaled = scale(logits[ids], top, params.temperature)
    if params.min_p > 0.0:
        # Falling, so that the kept ones are a prefix.
        kept = max(1, int(np.count_nonzero(np.exp(scaled) >= params.min_p)))
        ids, scaled = ids[:kept], scaled[:kept]
    return ids, scaled


def scale(logits: Logits, top: np.float32, temperature: float) -> Floats:
    """(logit − top) / temperature in float64: at most 0, −inf where a tiny temperature overflows."""
    with np.errstate(over="ignore"):
        scaled: Floats = (logits.astype(np.float64) - np.float64(top)) / temperature
    return scaled


def block_maxima(logits: Logits) -> Logits:
    """The largest logit of each block of 64 ids; the last block may be short. float32 [⌈vocab / 64⌉]"""
    maxima: Logits = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    return maxima


def _top_k_threshold(logits: Logits, k: int) -> np.float32:
    """A logit that at least k tokens reach; not always the largest such."""
    maxima = block_maxima(logits)
    # The k-th largest block maximum is reached by k tokens of k different blocks.
    values = maxima if k <= len(maxima) else logits
    threshold: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return threshold


def _nucleus(logits: Logits, top: np.float32, params: SamplingParams) -> tuple[Ids, Floats]:
    scaled = scale(logits, top, params.temperature)
    weights = np.exp(scaled)
    wanted = params.top_p * weights.sum()
    for depth in NUCLEUS_DEPTHS:
        ids = _in_order(logits, _above(scaled, -depth))
        mass = np.cumsum(weights[ids])
        if mass[-1] >= wanted:
            break
    else:
        ids = _in_order(logits, np.arange(len(logits)))
        mass = np.cumsum(weights[ids])
    ids = ids[: _reaching(mass, wanted)]
    return ids, scaled[ids]


def _reaching(mass: Floats, wanted: float) -> int:
    """How many it takes for the running sum to reach what is wanted: at least one, at most all."""
    return min(int(np.searchsorted(mass, wanted, side="left")) + 1, len(mass))


def _above(values: npt.NDArray[np.floating], threshold: float | np.floating) -> Ids:
    return np.flatnonzero(values >= threshold)


def _in_order(logits: Logits, ids: Ids) -> Ids:
    """ids, given ascending, by (logit descending, id ascending)."""
    ordered: Ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ordered
