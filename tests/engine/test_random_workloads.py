"""Hundreds of requests of random lengths, priorities, aborts and preemptions through the real machines on a
tiny model: pages are conserved, nobody reads another's, and every request says what it says alone.

PACELINE_WORKLOADS=N plays N workloads, drawn anew each time, instead of the few that are always the same.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common.model.llama import LlamaModel
from common.model.load import load_model
from common.sampling.params import SamplingParams
from common.sampling.sampler import sample
from services.draft.drafters.base import Drafter
from services.draft.drafters.draft_model import DraftModelDrafter
from services.draft.drafters.ngram import NgramDrafter
from tests.engine.sequences import PAGE, Chain, empty_cache, pages_for, run
from tests.engine.tiny_models import random_model
from tests.engine.workload_loopback import Job, Loopback, Told, Workload

VOCAB = 131
LONGEST = 40
DRAWN_ANEW = int(os.environ.get("PACELINE_WORKLOADS", "0"))
BEGINNINGS = ((), (5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29))


def draw_job(rng: random.Random) -> Job:
    submit_at = rng.randint(0, 250)
    greedy = rng.random() < 0.4
    return Job(
        (*rng.choice(BEGINNINGS), *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 10)))),
        max_tokens=rng.randint(1, 24),
        sampling=SamplingParams()
        if greedy
        else SamplingParams(temperature=rng.choice((0.7, 1.5)), top_p=0.95, seed=rng.randrange(10)),
        priority=rng.randint(0, 2),
        stop=rng.randrange(3, VOCAB),
        submit_at=submit_at,
        abort_at=submit_at + rng.randint(0, 150) if rng.random() < 0.2 else None,
    )


def draw_workload(seed: int, requests: int) -> Workload:
    rng = random.Random(seed)
    page_size = rng.choice((2, 4, 8))
    tight = rng.random() < 0.7
    positions = LONGEST + rng.randint(0, 20) if tight else 6 * LONGEST
    return Workload(
        jobs=tuple(draw_job(rng) for _ in range(requests)),
        pages=positions // page_size,
        page_size=page_size,
        max_model_len=LONGEST,
        max_num_seqs=rng.randint(2, 6),
        max_rows=rng.choice((8, 64)),
        chunk_rows=rng.choice((3, 16)),
        k=rng.randint(0, 4),
        bent=rng.choice((0.0, 0.3)),
        early_timers=rng.choice((0.0, 0.0, 0.05)),
        seed=seed,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    random_model("smollm2").save_pretrained(folder)
    return load_model(folder, dtype=torch.bfloat16, max_positions=80)


def drafter_named(name: str, model: LlamaModel) -> Drafter | None:
    match name:
        case "ngram":
            return NgramDrafter(VOCAB, "abc", shortest_n=1)
        case "model":
            return DraftModelDrafter("tiny", model, VOCAB, "abc")
    return None


def says_what_it_says_alone(model: LlamaModel, job: Job, told: Told) -> bool:
    """By one forward over prompt and text in memory of their own."""
    said = (*job.prompt, *told.text)
    cache = empty_cache(model, LONGEST + PAGE, fill=float("nan"))
    cache.keys[:, :PAGE] = cache.values[:, :PAGE] = 0.0
    rows = run(model, cache, [Chain(pages_for(len(said)), 0, said)]).logits.numpy()[:, :VOCAB]
    return all(sample(rows[at - 1], job.sampling, at) == said[at] for at in range(len(job.prompt), len(said)))


def check_end(job: Job, told: Told) -> None:
    assert job.stop not in told.text[:-1]
    match told.end:
        case "stop":
            assert told.text[-1] == job.stop
        case "length":
            assert len(told.text) == min(job.max_tokens, LONGEST - len(job.prompt))
        case "abort":
            assert job.abort_at is not None
        case end:
            raise AssertionError(f"{job} ended with {end!r}")


@torch.inference_mode()
def test_every_request_says_what_it_says_alone_whatever_runs_beside_it(model: LlamaModel) -> None:
    tally: Counter[str] = Counter()

    @settings(
        max_examples=DRAWN_ANEW or 12,
        derandomize=not DRAWN_ANEW,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
    )
    @given(st.integers(0, 1 << 60), st.integers(16, 20), st.sampled_from(("none", "ngram", "model")))
    def play(seed: int, requests: int, drafter: str) -> None:
        workload = draw_workload(seed, requests)
        loopback = Loopback(model, VOCAB, workload, drafter_named(drafter, model))
        loopback.play()
        for job, told in zip(workload.jobs, loopback.told.values(), strict=True):
            check_end(job, told)
            assert says_what_it_says_alone(model, job, told)
        tally.update(loopback.tally)
        tally["requests"] += len(workload.jobs)

    play()
    wanted = (
        "stop",
        "length",
        "abort",
        "no_room",
        "hits",
        "accepted",
        "rejected",
        "admission no_room",
        "idle",
    )
    assert all(tally[name] for name in wanted), tally
    assert tally["requests"] >= 190
