"""Sequences packed for a training step: nothing is padded, so no work goes to padding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from training.shards import Example


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a batch. rows: its positions among all rows. loss: its share of the loss rows. mask:
    float32 [loss rows, rows], −inf behind the position of the loss row."""

    rows: slice
    loss: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """rows: positions t of all sequences, one behind the other; loss rows: those from which a token of the
    answer is to be predicted.

    aux: [rows, aux_size]. next_ids, positions: int64 [rows], the id at t + 1 and t itself. loss_rows: int64
    [loss rows]. step_ids: int64 [steps, loss rows], the id at t + 1 + step. final: [loss rows, hidden], the
    target's final hidden state at t + 1. top: int64 [loss rows], its choice there. ids: int64 [loss rows],
    the id at t + 2. teacher: int64 [steps, loss rows], the loss row whose `final`, `top` and `ids` belong to
    the step, −1 where the answer has ended.
    """

    spans: tuple[Span, ...]
    aux: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    loss_rows: torch.Tensor
    step_ids: torch.Tensor
    final: torch.Tensor
    top: torch.Tensor
    ids: torch.Tensor
    teacher: torch.Tensor


def loss_positions(one: Example) -> torch.Tensor:
    """int64 [n]: positions from which the token two behind is a token of the answer."""

    return torch.nonzero(one.answer[2:]).flatten()


def pack(sequences: Sequence[Example], steps: int, aux_size: int) -> Batch:
    """Sequences of three ids or more, with a loss position each."""

    spans: list[Span] = []
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in Batch.__slots__ if name != "spans"}
    rows = losses = 0
    for one in sequences:
        count = one.ids.shape[0] - 2
        at = loss_positions(one)
        index = torch.full((count + steps,), -1)
        index[at] = torch.arange(losses, losses + at.shape[0])
        steps_at = at + torch.arange(steps).view(-1, 1)  # [steps, loss rows]
        hidden = torch.where(torch.arange(count) > at.view(-1, 1), -torch.inf, 0.0)
        spans.append(Span(slice(rows, rows + count), slice(losses, losses + at.shape[0]), hidden))
        parts["aux"].append(one.states[:count, :aux_size])
        parts["next_ids"].append(one.ids[1 : count + 1])
        parts["positions"].append(torch.arange(count))
        parts["loss_rows"].append(at + rows)
        parts["step_ids"].append(one.ids[(steps_at + 1).clamp(max=count + 1)])
        parts["final"].append(one.states[at + 1, aux_size:])
        parts["top"].append(one.top[at + 1])
        parts["ids"].append(one.ids[at + 2])
        parts["teacher"].append(index[steps_at])
        rows += count
        losses += at.shape[0]
    joined = {
        name: torch.cat(ones, dim=1 if name in ("step_ids", "teacher") else 0) for name, ones in parts.items()
    }
    return Batch(spans=tuple(spans), **joined)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which sequences every step of a run takes: a function of the seed alone, so that a run can go on.

    sizes: loss positions of every sequence. batch: loss positions that fill a step.
    """

    sizes: tuple[int, ...]
    batch: int
    seed: int

    def epoch(self, number: int) -> list[list[int]]:
        """Sequence numbers, by step."""

        order = list(range(len(self.sizes)))
        random.Random(f"{self.seed}:{number}").shuffle(order)
        steps: list[list[int]] = []
        filled = self.batch
        for index in order:
            if filled >= self.batch:
                steps.append([])
                filled = 0
            steps[-1].append(index)
            filled += self.sizes[index]
        return steps

    def from_step(self, step: int) -> Iterator[list[int]]:
        """Endless, beginning with step number `step`."""

        number = 0
        while True:
            steps = self.epoch(number)
            yield from steps[step:]
            step = max(0, step - len(steps))
            number += 1
