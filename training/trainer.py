"""The optimisation of a head: resumable at every checkpoint, told to stop by an event."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.model.checkpoint import EMBEDDING, FINAL_NORM, LM_HEAD, Checkpoint
from common.model.eagle3_checkpoint import write_eagle3
from common.model.eagle3_config import Eagle3Config
from common.model.layers import RmsNorm
from training.batches import Schedule, loss_positions, pack
from training.evaluation import Reach, reach
from training.head import PARAMETERS, TrainableHead
from training.loss import Teacher, soft_cross_entropy
from training.shards import DataError, Example

log = logging.getLogger("train-draft")

STEP_DECAY = 0.8
"""Weight of an unrolled step's loss against the one before it."""
OFF_PATH_SHARE = 0.2
"""Places at which a draft step went wrong that are drafted on all the same. In use none are: what follows a
wrong token is thrown away."""
STATE_FILE = "state.safetensors"
METRICS_FILE = "metrics.jsonl"
HEAD_FOLDER = "head"


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What decides the weights of a run, beside its data. batch: loss positions of a step. unroll: draft
    steps trained on. warmup: share of the steps over which the learning rate rises."""

    steps: int
    batch: int
    unroll: int
    learning_rate: float
    seed: int
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When a run writes and measures, in seconds. depth: draft steps of the measurement."""

    checkpoint_s: float = 300.0
    evaluate_s: float = 300.0
    report_s: float = 15.0
    depth: int = 4


class Trainer:
    """out: where checkpoints, the head and the metrics go; a run that stands there is gone on with. start:
    PARAMETERS to begin with. held: greedy answers that are not trained on. dtype: of products.

    Raises DataError for a checkpoint of other settings or data.
    """

    def __init__(
        self,
        config: Eagle3Config,
        target: Checkpoint,
        target_ids: torch.Tensor,
        start: Mapping[str, torch.Tensor],
        trained: Sequence[Example],
        held: Sequence[Example],
        plan: TrainPlan,
        out: Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        source = target.config
        self.plan = plan
        self.out = out
        self._trained = trained
        self._held = held
        embedding = target.tensor(EMBEDDING)
        self.head = TrainableHead(
            config,
            start,
            embedding=embedding,
            target_ids=target_ids,
            dtype=dtype,
        )
        output_rows = embedding if source.tied_embeddings else target.tensor(LM_HEAD)
        draft_ids = torch.full((source.vocab_size,), -1)
        draft_ids[target_ids] = torch.arange(target_ids.shape[0])
        final_norm = RmsNorm(target.tensor(FINAL_NORM).to(dtype), source.rms_eps)
        self._teacher = Teacher(final_norm, output_rows.index_select(0, target_ids).to(dtype), draft_ids)
        self._parameters = [self.head.parameter(name) for name in PARAMETERS]
        matrices = [one for one in self._parameters if one.dim() == 2]
        norms = [one for one in self._parameters if one.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        sizes = tuple(loss_positions(one).shape[0] for one in trained)
        self._schedule = Schedule(sizes, plan.batch, plan.seed)
        self.step = 0
        self._trained_s = 0.0
        self._identity = {"plan": asdict(plan), "data": [len(trained), sum(sizes)]}
        if (out / STATE_FILE).exists():
            self._load()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._schedule.epoch(0))

    def run(
        self, stop: threading.Event, pace: Pace, saved: Callable[[], None] = lambda: None
    ) -> Reach | None:
        """Until all steps are done, or soon after stop is set. saved: called after each checkpoint. The reach
        at the end; None when it was stopped."""

        started = checkpointed = evaluated = reported = time.monotonic()
        first, before_s = self.step, self._trained_s
        recent: list[tuple[float, list[float]]] = []
        batches = self._schedule.from_step(self.step)
        while self.step < self.plan.steps and not stop.is_set():
            recent.append(self._train(next(batches)))
            now = time.monotonic()
            self._trained_s = before_s + now - started
            if now - reported >= pace.report_s or self.step == self.plan.steps:
                reported = now
                self._report(recent, (now - started) / (self.step - first))
                recent.clear()
            if now - evaluated >= pace.evaluate_s:
                self.evaluate(pace.depth)
                evaluated = time.monotonic()
            if now - checkpointed >= pace.checkpoint_s:
                self.save()
                saved()
                checkpointed = time.monotonic()
        self.save()
        final = None if stop.is_set() and self.step < self.plan.steps else self.evaluate(pace.depth)
        saved()
        return final

    def evaluate(self, depth: int) -> Reach | None:
        """None without held-out answers."""

        if not self._held:
            return None
        result = reach(self.head, self._held, depth)
        shown = " / ".join(f"{one:.3f}" for one in result.by_position)
        log.info("step %d: held-out reach %s, %.3f tokens per step", self.step, shown, result.tokens_per_step)
        self._note(
            {"step": self.step, "reach": result.by_position, "tokens_per_step": result.tokens_per_step}
        )
        return result

    def save(self) -> None:
        """The state of the run, and the head as it is served."""

        self.out.mkdir(parents=True, exist_ok=True)
        write_eagle3(self.out / HEAD_FOLDER, self.head.config, self.head.weights(torch.bfloat16))
        tensors = {}
        for name, parameter in zip(PARAMETERS, self._parameters, strict=True):
            state = self._optimizer.state[parameter]
            tensors[name] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}.{moment}"] = state.get(moment, torch.zeros_like(parameter))
        tensors["target_ids"] = self.head.target_ids
        metadata = {
            "identity": json.dumps(self._identity),
            "step": str(self.step),
            "trained_s": str(self._trained_s),
        }
        scratch = self.out / f".{STATE_FILE}.tmp"
        save_file(tensors, scratch, metadata)
        os.replace(scratch, self.out / STATE_FILE)

    def _load(self) -> None:
        path = self.out / STATE_FILE
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if json.loads(metadata["identity"]) != self._identity or not torch.equal(
                file.get_tensor("target_ids"), self.head.target_ids
            ):
                raise DataError(
                    f"{path} belongs to a run with other settings or data: {metadata['identity']}, now"
                    f" {json.dumps(self._identity)}; choose another output directory or remove it"
                )
            self.step = int(metadata["step"])
            self._trained_s = float(metadata["trained_s"])
            with torch.no_grad():
                for name, parameter in zip(PARAMETERS, self._parameters, strict=True):
                    parameter.copy_(file.get_tensor(name))
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(self.step)),
                        "exp_avg": file.get_tensor(f"{name}.exp_avg").clone(),
                        "exp_avg_sq": file.get_tensor(f"{name}.exp_avg_sq").clone(),
                    }
        log.info("going on after step %d of %d", self.step, self.plan.steps)

    def _train(self, chosen: Sequence[int]) -> tuple[float, list[float]]:
        """One optimisation step. The mean loss, and the share of its places at which every draft step chose
        as the target; a later step drafts mostly where those before it were right."""

        plan = self.plan
        chance = torch.Generator().manual_seed(plan.seed * 1_000_003 + self.step)
        batch = pack([self._trained[index] for index in chosen], plan.unroll, self.head.config.aux_size)
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate * _schedule_factor(self.step, plan)
        chances = self._teacher.chances(batch.final)
        wanted = self._teacher.draft_ids[batch.top]
        unrolled = self.head.unroll(batch)
        total = torch.zeros(())
        weight = 0.0
        right: list[float] = []
        for step in range(plan.unroll):
            output = unrolled.step()
            teacher = batch.teacher[step, unrolled.live]
            taught = torch.nonzero((teacher >= 0) & (wanted[teacher] >= 0)).flatten()
            if not taught.numel():
                break
            teacher = teacher[taught]
            loss, best = soft_cross_entropy(
                output.index_select(0, taught), self.head.parameter("lm_head"), chances, teacher
            )
            total = total + STEP_DECAY**step * loss
            weight += STEP_DECAY**step * taught.numel()
            hits = best == wanted[teacher]
            right.append(hits.float().mean().item())
            rows = taught[hits | (torch.rand(taught.shape, generator=chance) < OFF_PATH_SHARE)]
            if not rows.numel():
                break
            unrolled.keep(rows)
        mean = total / weight
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(mean)
        torch.nn.utils.clip_grad_norm_(self._parameters, plan.clip)
        self._optimizer.step()
        self.step += 1
        return mean.item(), right + [0.0] * (plan.unroll - len(right))

    def _report(self, recent: Sequence[tuple[float, list[float]]], step_s: float) -> None:
        loss = sum(one for one, _ in recent) / len(recent)
        shares = [sum(ones) / len(recent) for ones in zip(*(right for _, right in recent), strict=True)]
        left_s = (self.plan.steps - self.step) * step_s
        shown = " / ".join(f"{share:.3f}" for share in shares)
        log.info(
            "step %d of %d, loss %.3f, agreement %s, %.2f s per step, %.0f min left",
            self.step,
            self.plan.steps,
            loss,
            shown,
            step_s,
            left_s / 60,
        )
        self._note({"step": self.step, "loss": loss, "agreement": shares, "trained_s": self._trained_s})

    def _note(self, values: dict[str, object]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def _schedule_factor(step: int, plan: TrainPlan) -> float:
    """Linear rise, then half a cosine down to 2 %."""

    warmup = max(1, round(plan.warmup * plan.steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, plan.steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def frequent_ids(sequences: Iterable[Example], size: int, vocab_size: int) -> torch.Tensor:
    """The `size` ids that answers use and the target prefers most, ascending; ids of equal count by id."""

    counts: Counter[int] = Counter()
    for one in sequences:
        at = torch.nonzero(one.answer).flatten()
        counts.update(one.ids[at].tolist())
        counts.update(one.top[at - 1].tolist())
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))
