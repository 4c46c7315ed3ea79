"""The target's and the draft's device work on one tiny model: what is drafted and accepted is what plain
decoding says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from common.kv.lengths import pages_for
from common.messages.lifecycle import Configure
from common.model.llama import LlamaModel
from common.model.load import load_model
from common.sampling.params import SamplingParams
from services.draft.drafters import draft_model
from services.draft.drafters.base import SharedState
from services.draft.drafters.draft_model import DraftModelDrafter
from services.draft.work import DraftRow, DraftWork
from services.target.runner import TargetRunner
from services.target.work import PrefillChunk, RoundWork, TreeRows
from tests.engine.tiny_models import random_model

VOCAB = 131
PAGE = 4
PAGES = 64
SLOT_PAGES = {1: tuple(range(40, 20, -1)), 2: tuple(range(41, 61))}
PROMPT = tuple(random.Random(7).randrange(3, VOCAB) for _ in range(21))
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    random_model("smollm2").save_pretrained(folder)
    return load_model(folder, dtype=torch.bfloat16, max_positions=80)


class Target:
    """A slot of a TargetRunner, driven round by round."""

    def __init__(self, model: LlamaModel, ids: Ids, sampling: SamplingParams, slot: int = 1) -> None:
        self.runner = TargetRunner(model, VOCAB)
        self.runner.allocate(Configure(1, 1, PAGES, PAGE, 4, 80, 9))
        self.ids, self.sampling, self.slot = ids, sampling, slot
        chunk = PrefillChunk(slot, SLOT_PAGES[slot], 0, ids[:-1])
        self.runner.execute(RoundWork(0, 0, (chunk,), ()))

    def step(self, tokens: Ids = (), parents: Ids = ()) -> Ids:
        """Verify a tree below the bonus token; the ids that were committed."""
        tree = TreeRows(
            self.slot,
            SLOT_PAGES[self.slot],
            len(self.ids),
            (self.ids[-1], *tokens),
            (-1, *(parents or range(len(tokens)))),
            self.sampling,
        )
        (result,) = self.runner.execute(RoundWork(0, 1, (), (tree,))).trees
        self.ids += result.ids
        return result.ids


def decoded(model: LlamaModel, sampling: SamplingParams, count: int) -> Ids:
    target = Target(model, PROMPT, sampling)
    while len(target.ids) < len(PROMPT) + count:
        target.step()
    return target.ids


def drafter(model: LlamaModel) -> DraftModelDrafter:
    made = DraftModelDrafter("tiny", model, VOCAB, "t")
    table = torch.zeros(4, 20, dtype=torch.int32)
    for slot, pages in SLOT_PAGES.items():
        table[slot] = torch.tensor(pages)
    kv = torch.full((PAGES * PAGE * made.kv_bytes_per_position,), 0xFF, dtype=torch.uint8)
    made.attach(SharedState(table, kv, None, PAGES, PAGE, 80, 9))
    return made


def row(
    ids: Ids, *, k: int = 4, slot: int = 1, sampling: SamplingParams = GREEDY, request: int = 1
) -> DraftRow:
    return DraftRow(slot, (request, 1), ids, len(ids), PAGE * 20, k, sampling)


def drafted(made: DraftModelDrafter, *rows: DraftRow) -> dict[int, Ids]:
    return {tree.slot: tree.tokens[1:] for tree in made.draft(DraftWork(0, 1, rows, ())).trees}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_chains_and_trees_commit_what_plain_decoding_commits(
    model: LlamaModel, sampling: SamplingParams
) -> None:
    expected = decoded(model, sampling, 24)
    target = Target(model, PROMPT, sampling)
    chooser = random.Random(3)
    while len(target.ids) + 4 < len(expected):
        right = expected[len(target.ids) :][:3]
        wrong = tuple((token + 1) % VOCAB for token in right)
        tokens, parents = chooser.choice(
            [
                ((wrong[0], right[0], wrong[1], right[1], right[2]), (0, 0, 2, 2, 4)),
                ((right[0], wrong[0], right[1], wrong[1]), (0, 0, 1, 1)),
                ((wrong[0], wrong[1]), (0, 1)),
                (right, (0, 1, 2)),
            ]
        )
        before = len(target.ids)
        committed = target.step(tokens, parents)
        assert target.ids == expected[: len(target.ids)]
        assert (len(committed) > 1) == (right[0] in tokens)
        assert len(target.ids) > before


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_draft_model_with_the_targets_weights_drafts_what_the_target_says(
    model: LlamaModel, sampling: SamplingParams
) -> None:
    expected = decoded(model, sampling, 24)
    made = drafter(model)
    for length in (21, 23, 24, 28, 33, 34):
        assert drafted(made, row(expected[:length], sampling=sampling)) == {1: expected[length : length + 4]}


def test_slots_that_draft_together_draft_what_they_draft_alone(model: LlamaModel) -> None:
    other = PROMPT[::-1][:10]
    together = drafted(drafter(model), row(PROMPT), row(other, slot=2, k=2, request=2))
    assert together[1] == drafted(drafter(model), row(PROMPT))[1]
    assert together[2] == drafted(drafter(model), row(other, slot=2, k=2))[2]


def test_rejected_drafts_leave_nothing_behind(model: LlamaModel) -> None:
    for start in range(8):
        prompt = PROMPT[start:]
        made = drafter(model)
        (first,) = drafted(made, row(prompt)).values()
        turned = (*prompt, *((token + 50) % VOCAB for token in first[:3]), 5)
        assert drafted(made, row(turned)) == drafted(drafter(model), row(turned))


def test_state_past_invalid_from_is_computed_again(model: LlamaModel) -> None:
    made = drafter(model)
    expected = drafted(made, row(PROMPT))
    assert made._cache is not None
    made._cache.keys.fill_(float("nan"))
    made._cache.values.fill_(float("nan"))
    assert drafted(made, replace(row(PROMPT), invalid_from=0)) == expected


def test_a_slot_with_a_new_owner_starts_over(model: LlamaModel) -> None:
    made = drafter(model)
    drafted(made, row(PROMPT))
    assert made._cache is not None
    made._cache.keys.fill_(float("nan"))
    assert drafted(made, row(PROMPT, request=2)) == drafted(drafter(model), row(PROMPT))


def test_a_slot_far_behind_proposes_once_it_has_caught_up(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "EXTEND_ROWS", 8)
    made = drafter(model)
    assert drafted(made, row(PROMPT)) == {}
    assert drafted(made, row(PROMPT)) == {}
    monkeypatch.undo()
    assert drafted(made, row(PROMPT)) == drafted(drafter(model), row(PROMPT))


@pytest.mark.parametrize(("spare", "expected"), [(-1, 0), (0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_drafting_stops_where_the_allocated_positions_end(
    model: LlamaModel, spare: int, expected: int
) -> None:
    """The root is written at position committed − 1, each further draft token but the last one behind it."""
    limited = replace(row(PROMPT), allocated=len(PROMPT) + spare)
    made = drafter(model)
    chains = drafted(made, limited)
    assert len(chains.get(1, ())) == expected
    written = made._lanes[1].ids
    assert len(written) <= limited.allocated
    assert pages_for(limited.allocated, PAGE) <= len(SLOT_PAGES[1])


def test_drafting_stops_where_the_draft_models_context_ends(model: LlamaModel) -> None:
    ids = tuple(random.Random(1).randrange(3, VOCAB) for _ in range(79))
    assert len(drafted(drafter(model), row(ids))[1]) == 2
    assert drafted(drafter(model), row((*ids, 5, 6))) == {}
