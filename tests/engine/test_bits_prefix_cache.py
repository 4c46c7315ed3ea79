"""A log that begins with pages from the prefix cache says bit for bit what it says when it computes them."""

from __future__ import annotations

import random

import pytest
import torch

from common.messages.lifecycle import Configure
from common.messages.rounds import Admit, Commit, LiveRow, ReleaseRow, Verdict, VerdictRow
from common.model.llama import LlamaModel
from common.model.load import load_model
from common.sampling.params import SamplingParams
from services.target import events as ev
from services.target.runner import TargetRunner
from tests.engine.tiny_models import random_model
from tests.protocol.protocol_harness import EPOCH, TargetBench, messages, of

VOCAB = 100
NEW = 12
PROMPT = tuple(random.Random(5).randrange(3, VOCAB) for _ in range(22))
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    random_model("smollm2").save_pretrained(folder)
    return load_model(folder, dtype=torch.bfloat16, max_positions=80)


class Service:
    """A configured target with its real device work, and what its last request found in the cache."""

    def __init__(self, model: LlamaModel) -> None:
        self.bench = TargetBench()
        self.runner = TargetRunner(model, VOCAB)
        self.runner.allocate(Configure(EPOCH, self.bench.link.incarnation, 20, 4, 9, 40, 4))
        self.cached = 0
        self._requests = 0

    def generate(self, prompt: tuple[int, ...], sampling: SamplingParams, chunk: int = 7) -> tuple[int, ...]:
        """The ids of one request that runs alone and is released at its end."""
        self._requests += 1
        verify = self.bench.verify(admits=[Admit(self._requests, list(prompt), sampling)])
        answer = messages(self.bench.tell(verify), Verdict)[0].admitted[0]
        self.cached = kv = answer.cached
        ids, sent = list(prompt), len(prompt)
        tenancy = (answer.request, answer.slot, answer.generation)
        while len(ids) < len(prompt) + NEW:
            end = min(kv + chunk, len(ids) - 1)
            commit = Commit(sent, ids[sent:])
            row = self._round(LiveRow(*tenancy, commit, kv, end, verify=end == len(ids) - 1))
            sent = len(ids)
            ids += row.ids
            kv = row.kv
        ended = ReleaseRow(*tenancy, Commit(sent, ids[sent:]))
        self.bench.tell(self.bench.verify(releases=[ended]))
        return tuple(ids)

    def _round(self, live: LiveRow) -> VerdictRow:
        effects = self.bench.tell(self.bench.verify([live]))
        result = self.runner.execute(of(effects, ev.Run)[0].work)
        return messages(self.bench.feed(ev.Executed(result)), Verdict)[0].rows[0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_repeated_prompt_says_the_same_with_a_hit(model: LlamaModel, sampling: SamplingParams) -> None:
    service = Service(model)
    fresh = service.generate(PROMPT, sampling)
    assert service.cached == 0
    assert service.generate(PROMPT, sampling, chunk=3) == fresh
    assert service.cached == 20


@pytest.mark.parametrize("shared", [4, 8, 11, 21])
def test_a_prompt_that_shares_a_beginning_says_what_it_says_alone(model: LlamaModel, shared: int) -> None:
    other = (*PROMPT[:shared], *(token + 1 for token in PROMPT[shared:20]))
    service = Service(model)
    service.generate(PROMPT, GREEDY)
    after_a_hit = service.generate(other, GREEDY)
    assert service.cached == shared // 4 * 4
    assert after_a_hit == Service(model).generate(other, GREEDY)


def test_a_conversation_that_goes_on_finds_what_was_generated(model: LlamaModel) -> None:
    service = Service(model)
    said = service.generate(PROMPT[:9], SAMPLED)
    after_a_hit = service.generate((*said, 5, 6), SAMPLED)
    assert service.cached == 20
    assert after_a_hit == Service(model).generate((*said, 5, 6), SAMPLED)
