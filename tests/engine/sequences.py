"""Sequences of ids put through a model in every way that the services use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.attention.kv_cache import KvCache
from common.attention.segments import build_batch
from common.graphs.padded import padded_rows
from common.model.batch import ForwardBatch
from common.model.llama import LlamaModel
from common.model.steps import CapturedRows

PAGE = 16


@dataclass(frozen=True)
class Chain:
    pages: Sequence[int]
    start: int
    ids: Sequence[int]


@dataclass(frozen=True)
class Tree:
    pages: Sequence[int]
    base: int
    tokens: Sequence[int]
    parents: Sequence[int]


def chain_tree(pages: Sequence[int], base: int, tokens: Sequence[int]) -> Tree:
    return Tree(pages, base, tokens, list(range(-1, len(tokens) - 1)))


def pages_for(positions: int, first: int = 1) -> list[int]:
    return list(range(first, first + -(-positions // PAGE)))


def empty_cache(model: LlamaModel, positions: int, fill: float = 0.0) -> KvCache:
    cache = KvCache.allocate(model.config, -(-positions // PAGE) * PAGE, model.dtype)
    cache.keys.fill_(fill)
    cache.values.fill_(fill)
    return cache


@dataclass(frozen=True)
class Output:
    """logits: float32 [rows, vocab]. captured: [rows, len(capture) × hidden], None if none was asked for."""

    logits: torch.Tensor
    captured: torch.Tensor | None


def run(
    model: LlamaModel,
    cache: KvCache,
    chains: Sequence[Chain] = (),
    trees: Sequence[Tree] = (),
    capture: tuple[int, ...] | None = None,
) -> Output:
    """Logits of every row, in the order of the rows."""

    batch = build_batch(chains, trees, PAGE)
    batch = replace(batch, logit_rows=torch.arange(batch.ids.shape[0]))
    if capture is None:
        return Output(model.forward(batch, cache), None)
    rows = captured_rows(model, batch, capture)
    return Output(model.forward(batch, cache, capture=rows), rows.rows[: batch.ids.shape[0]])


def captured_rows(model: LlamaModel, batch: ForwardBatch, layers: tuple[int, ...]) -> CapturedRows:
    """Memory for them."""

    shape = padded_rows(batch.ids.shape[0]), len(layers) * model.config.hidden_size
    return CapturedRows(layers, torch.empty(shape, dtype=model.dtype))


def greedy(
    model: LlamaModel, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy continuations of all prompts side by side, and every step's 16 best: float32 [steps, prompts,
    16, 2], logit and id."""

    length = max(len(prompt) for prompt in prompts) + steps
    per_prompt = len(pages_for(length))
    cache = empty_cache(model, (1 + per_prompt * len(prompts)) * PAGE)
    pages = [pages_for(length, 1 + i * per_prompt) for i in range(len(prompts))]
    logs = [list(prompt) for prompt in prompts]
    for prompt, own in zip(prompts, pages, strict=True):
        model.forward(build_batch([Chain(own, 0, prompt[:-1])], [], PAGE), cache)
    best = []
    for _ in range(steps):
        trees = [chain_tree(own, len(log), log[-1:]) for own, log in zip(pages, logs, strict=True)]
        logits = model.forward(build_batch([], trees, PAGE), cache)
        top = logits.topk(16)
        best.append(torch.stack([top.values, top.indices.float()], dim=-1))
        # argmax, not topk: ties go to the lowest id.
        for log, token in zip(logs, logits.argmax(-1).tolist(), strict=True):
            log.append(token)
    return [log[len(prompt) :] for log, prompt in zip(logs, prompts, strict=True)], torch.stack(best)
