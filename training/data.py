"""The data of a training run: shards of what the target wrote, as many as asked for, kept between runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.model.tokenizer import Tokenizer
from training.shards import Example, read_shard, shard_paths, write_shard
from training.target import RecordingTarget
from training.turns import TurnFilter
from training.writing import Writer

log = logging.getLogger("train-draft")

SHARD_TOKENS = 24_000
"""Tokens of a shard, prompts included; what is being written is lost when the run is killed."""


@dataclass(frozen=True, slots=True)
class DataPlan:
    """folder: where the shards lie. answer_tokens: wanted in all. longest_answer: tokens of one answer at
    most. prompts: user turns to answer instead of the model's own. forbidden: turns that are left out."""

    folder: Path
    answer_tokens: int
    longest_answer: int
    seed: int
    prompts: tuple[str, ...] | None = None
    forbidden: tuple[str, ...] = ()


def write_data(
    plan: DataPlan,
    target: RecordingTarget,
    tokenizer: Tokenizer,
    model_identity: str,
    stop: threading.Event,
) -> int:
    """Writes shards until there are enough, or soon after stop is set. The answer tokens that there are in
    all."""

    plan.folder.mkdir(parents=True, exist_ok=True)
    paths = shard_paths(plan.folder)
    there = all_sequences(plan.folder, model_identity=model_identity, layers=target.layers)
    present = sum(one.answer_tokens for one in there)
    if present >= plan.answer_tokens:
        return present
    turns = [*plan.forbidden, *(one.turn for one in there)]
    log.info("writing %d answer tokens; %d are there", plan.answer_tokens - present, present)
    writer = Writer(
        target,
        tokenizer,
        TurnFilter(turns),
        answer_tokens=plan.longest_answer,
        seed=plan.seed + len(paths),
        prompts=plan.prompts,
    )
    pending: list[Example] = []
    pending_tokens = 0
    started, written = time.monotonic(), 0
    for sequence in writer.sequences():
        pending.append(sequence)
        pending_tokens += sequence.ids.shape[0]
        written += sequence.answer_tokens
        enough = present + written >= plan.answer_tokens
        if pending_tokens >= SHARD_TOKENS or enough:
            _flush(plan, target, model_identity, pending)
            pending_tokens = 0
            _report(present + written, plan.answer_tokens, written / (time.monotonic() - started))
        if enough or stop.is_set():
            break
    if pending:
        _flush(plan, target, model_identity, pending)
    return present + written


def _flush(plan: DataPlan, target: RecordingTarget, model_identity: str, pending: list[Example]) -> None:
    write_shard(plan.folder, pending, model=model_identity, layers=target.layers)
    pending.clear()


def _report(present: int, wanted: int, per_s: float) -> None:
    left_s = max(0, wanted - present) / per_s
    log.info("%d of %d answer tokens, %.0f/s, %.0f min left", present, wanted, per_s, left_s / 60)


def all_sequences(folder: Path, *, model_identity: str, layers: Sequence[int]) -> list[Example]:
    """What was written so far. Raises DataError for shards of another model or other layers."""

    return [
        one
        for path in shard_paths(folder)
        for one in read_shard(path, model=model_identity, layers=tuple(layers))
    ]
