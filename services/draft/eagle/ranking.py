"""Which tokens of the head's vocabulary are the likeliest next: by log-probability, or, where the target
samples, by what its noise will make of them (coupled drafting)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.sampling.noise import gumbel
from common.sampling.params import SamplingParams

CANDIDATES = 64
"""Most probable tokens that noise may still lift to the front; what is behind them is left out."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """logits: float32 [rows, draft_vocab]. Of the most probable draft ids, the most probable first: scores,
    float32 [rows, width], log-probabilities; ids, int64 [rows, width]."""

    logits: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor


class Ranking:
    """For the slots of one drafting. bases: committed length of each. target_ids: int64 [draft_vocab]."""

    def __init__(
        self, sampling: Sequence[SamplingParams], bases: Sequence[int], target_ids: torch.Tensor
    ) -> None:
        self._target_ids = target_ids
        self._sampled = [
            (slot, params, base)
            for slot, (params, base) in enumerate(zip(sampling, bases, strict=True))
            if params.temperature > 0.0
        ]

    @property
    def is_greedy(self) -> bool:
        """No slot samples: the most probable tokens are the best ones."""
        return not self._sampled

    def children(self, predicted: Predicted, nodes: int, *, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens behind each of a slot's nodes, which stand on this level; the root's is 0.
        predicted: [slots × nodes, …]. Scores, float32 ≤ 0, and the target's ids, int64: both [slots, nodes,
        width]."""
        width = predicted.ids.shape[1]
        scores = predicted.scores.view(-1, nodes, width).clone()
        ids = self._target_ids[predicted.ids].view(-1, nodes, width)
        for slot, params, base in self._sampled:
            rows = predicted.logits[slot * nodes : (slot + 1) * nodes]
            scores[slot], ids[slot] = self._coupled(rows, params, base + level, width)
        return scores, ids

    def _coupled(
        self, logits: torch.Tensor, params: SamplingParams, position: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: float32 [nodes, draft_vocab]. position: of the tokens that are ranked."""
        count = min(CANDIDATES, logits.shape[1])
        scaled = logits / params.temperature
        best, drafted = scaled.topk(count, dim=-1)
        ids = self._target_ids[drafted]
        noise = torch.from_numpy(gumbel(params.seed, position, ids.flatten().numpy())).view_as(best)
        kept = best.masked_fill(_filtered(scaled, best, params), float("-inf"))
        scores, chosen = (kept + noise.float()).log_softmax(-1).topk(width, dim=-1)
        return scores, ids.gather(1, chosen)


def _filtered(scaled: torch.Tensor, best: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which of the best, largest first, the target would not draw if it saw the head's logits. scaled: by
    temperature, [nodes, draft_vocab]. best: [nodes, candidates]."""
    whole = scaled
    dropped = torch.zeros_like(best, dtype=torch.bool)
    if 0 < params.top_k < best.shape[1]:
        dropped[:, params.top_k :] = True
        whole = best[:, : params.top_k]
    probable = (best - whole.logsumexp(dim=-1, keepdim=True)).exp()
    if params.top_p < 1.0:
        dropped |= probable.cumsum(-1) - probable >= params.top_p
    if params.min_p > 0.0:
        dropped |= probable < params.min_p * probable[:, :1]
    dropped[:, 0] = False
    return dropped
