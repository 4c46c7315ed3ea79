"""Cross-entropy of the head's distribution against the target's, both over the draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from common.model.layers import RmsNorm

CHUNK_ROWS = 256
"""Rows whose logits are alive at once."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's output layer. final_norm: over its hidden size. rows: [draft_vocab, hidden], its output
    rows of the draft vocabulary. draft_ids: int64 [vocab], draft id of every id, −1 for those outside."""

    final_norm: RmsNorm
    rows: torch.Tensor
    draft_ids: torch.Tensor

    @torch.no_grad()
    def chances(self, final: torch.Tensor) -> torch.Tensor:
        """The target's distribution restricted to the draft vocabulary and renormalised. final: [n, hidden],
        final hidden states. Returns [n, draft_vocab] in the type of `rows`."""

        chances = final.new_empty(final.shape[0], self.rows.shape[0], dtype=self.rows.dtype)
        for first in range(0, final.shape[0], CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            logits = self.final_norm(final[part].to(self.rows.dtype)) @ self.rows.T
            chances[part] = logits.float().softmax(-1).to(self.rows.dtype)
        return chances


class _SoftCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of rows, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        lm_head: torch.Tensor,
        chances: torch.Tensor,
        teacher: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        matrix = lm_head.to(outputs.dtype)
        grad_outputs = torch.empty_like(outputs)
        grad_head = torch.zeros_like(lm_head)
        loss = outputs.new_zeros((), dtype=torch.float32)
        best = torch.empty_like(teacher)
        for first in range(0, outputs.shape[0], CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            rows = outputs[part]
            logits = (rows @ matrix.T).float()
            best[part] = logits.argmax(-1)
            wanted = chances.index_select(0, teacher[part]).float()
            total = logits.logsumexp(-1, keepdim=True)
            loss += (total.squeeze(-1) - (wanted * logits).sum(-1)).sum()
            grad = logits.sub_(total).exp_().sub_(wanted).to(outputs.dtype)
            grad_outputs[part] = grad @ matrix
            grad_head += grad.T @ rows
        ctx.save_for_backward(grad_outputs, grad_head)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_outputs, grad_head = ctx.saved_tensors
        return grads[0].to(grad_outputs.dtype) * grad_outputs, grads[0] * grad_head, None, None


def soft_cross_entropy(
    outputs: torch.Tensor,
    lm_head: torch.Tensor,
    chances: torch.Tensor,
    teacher: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over rows (float32 scalar), and the draft id that each row likes best (int64 [n]).

    outputs: [n, hidden]. lm_head: float32 [draft_vocab, hidden]. chances: [m, draft_vocab], the teacher's.
    teacher: int64 [n], each row's row of chances.
    """

    loss, best = _SoftCrossEntropy.apply(outputs, lm_head, chances, teacher)  # type: ignore[no-untyped-call]
    return loss, best
