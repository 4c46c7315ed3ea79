"""The token at a position: a function of its logits, the sampling parameters and the position alone."""

from __future__ import annotations

import numpy as np

from common.sampling.filters import Logits, block_maxima, is_filtered, scale, survivors
from common.sampling.noise import BLOCK, Floats, Ids, block_gumbel, gumbel
from common.sampling.params import SamplingParams

ROUNDING = 1e-9
"""More than the noise of a block's first id, computed as a bound and as itself, can differ by rounding."""


def sample(logits: Logits, params: SamplingParams, position: int) -> int:
    """The token id at an absolute position. logits: float32 [vocab], −inf where a token may not stand.

    Temperature 0 takes the largest logit, otherwise the largest sum of a kept token's scaled logit and its
    noise (seed, position, id), which samples the filtered distribution; ties go to the lowest id.
    Raises ValueError when the row has NaN or +inf, or allows no token.
    """
    best = int(logits.argmax())
    top = logits[best]
    if not np.isfinite(top):
        raise ValueError(
            f"logits for position {position} allow no token: all are -inf"
            if top == -np.inf
            else f"logits for position {position} are not finite: {top} at token {best}"
        )
    if params.temperature == 0.0:
        return best
    if not is_filtered(params, len(logits)):
        return _race(logits, top, params, position)
    ids, scaled = survivors(logits, params)
    return _first(ids, scaled + gumbel(params.seed, position, ids))


def _race(logits: Logits, top: np.float32, params: SamplingParams, position: int) -> int:
    """Draws from the whole row; looks only into blocks whose largest logit and largest noise could win."""
    maxima = block_maxima(logits)
    bounds = scale(maxima, top, params.temperature) + block_gumbel(params.seed, position, len(maxima))

    def scores(blocks: Ids) -> tuple[Ids, Floats]:
        ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        ids = ids[: np.searchsorted(ids, len(logits))]
        return ids, scale(logits[ids], top, params.temperature) + gumbel(params.seed, position, ids)

    _, sure = scores(np.array([bounds.argmax()]))
    return _first(*scores(np.flatnonzero(bounds >= sure.max() - ROUNDING)))


def _first(ids: Ids, scores: Floats) -> int:
    return int(ids[scores == scores.max()].min())
