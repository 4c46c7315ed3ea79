"""How far a head's drafts reach on answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.batches import Batch, pack
from training.head import TrainableHead
from training.shards import Example


@dataclass(frozen=True, slots=True)
class Reach:
    """by_position: share of places at which the first 1, 2, … drafted tokens are all the target's. positions:
    such places. tokens_per_step: committed per step, when every step of every answer drafts a chain of that
    length."""

    by_position: tuple[float, ...]
    positions: int
    tokens_per_step: float


def is_greedy(one: Example) -> bool:
    """Every token of the answer is the target's first choice."""

    at = torch.nonzero(one.answer).flatten()
    return bool((one.top[at - 1] == one.ids[at]).all())


@torch.no_grad()
def reach(head: TrainableHead, sequences: Sequence[Example], steps: int, batch: int = 12) -> Reach:
    """sequences: greedy answers. steps: length of the chain."""

    held = torch.zeros(steps)
    places = committed = rounds = 0
    for first in range(0, len(sequences), batch):
        packed = pack(sequences[first : first + batch], steps, head.config.aux_size)
        right = agreement(head, packed, steps)
        held += right.sum(dim=1)
        places += right.shape[1]
        for span in packed.spans:
            accepted = right[:, span.loss].sum(dim=0).long().tolist()
            at = 0
            while at < len(accepted):
                step = min(accepted[at] + 1, len(accepted) - at)
                at += step
                committed += step
                rounds += 1
    return Reach(tuple((held / places).tolist()), places, committed / rounds)


def agreement(head: TrainableHead, batch: Batch, steps: int) -> torch.Tensor:
    """float32 [steps, loss rows]: 1 where all tokens drafted from the row up to the step are the answer's."""

    matrix = head.lm_head.to(head.dtype)
    right = torch.zeros(steps, batch.loss_rows.shape[0])
    so_far = torch.ones(batch.loss_rows.shape[0], dtype=torch.bool)
    for step, output in enumerate(head(batch, steps)):
        drafted = head.target_ids[(output @ matrix.T).argmax(-1)]
        teacher = batch.teacher[step]
        so_far = so_far & (teacher >= 0) & (drafted == batch.ids[teacher])
        right[step] = so_far
    return right
