"""What `paceline eval-draft` counts, on a tiny target, and how it is told."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.bars import grouped_bars
from bench.eval_draft import ALL, GREEDY, Pair, Tally, report
from bench.prompts import GROUPS
from common.model.llama import LlamaModel
from services.draft.drafters.ngram import NgramDrafter
from services.draft.eagle.growth import Shape
from tests.engine.eagle_pair import VOCAB, eagle_drafter, prompt, tiny_target

TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


def steps_of(model: LlamaModel, drafter, k: int) -> list[int]:
    return Pair(model, drafter, k).run(prompt()[:20], TOKENS, frozenset(), GREEDY, GREEDY)


@pytest.mark.parametrize("shape", [Shape(1), Shape(4, 4)])
def test_every_step_commits_one_token_and_what_it_accepted(model: LlamaModel, shape: Shape) -> None:
    steps = steps_of(model, eagle_drafter(shape), 4)
    assert TOKENS <= sum(steps) <= TOKENS + 4
    assert all(1 <= committed <= 5 for committed in steps)


def test_an_end_among_the_committed_tokens_ends_the_count(model: LlamaModel) -> None:
    drafter = NgramDrafter(VOCAB, "t", shortest_n=2)
    assert len(Pair(model, drafter, 4).run(prompt(), TOKENS, frozenset(range(VOCAB)), GREEDY, GREEDY)) == 1


def test_a_tally_says_how_far_its_steps_reached() -> None:
    tally = Tally()
    for committed in (1, 3, 2, 2):
        tally.add(committed)
    assert (tally.steps, tally.tokens_per_step, tally.shares()) == (4, 2.0, "0.75 0.25")
    assert Tally().tokens_per_step == 0.0


def test_the_report_and_the_picture_hold_every_drafter_and_category() -> None:
    tally = Tally(4, 8, [3, 1])
    found = {name: dict.fromkeys((*GROUPS, ALL), tally) for name in ("ngram", "a<b")}
    table = report(found)
    assert table.splitlines()[0] == "| tokens per step | ngram | a<b |"
    assert all(f"| {group} | 2.00 | 2.00 |" in table for group in (*GROUPS, ALL))
    assert "| ngram | 4 | 0.75 0.25 |" in table
    picture = grouped_bars("tokens", {name: dict.fromkeys(GROUPS, 2.0) for name in found})
    texts = [one.text for one in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"ngram", "a<b", *GROUPS} <= set(texts)
    assert texts.count("2.00") == 2 * len(GROUPS)
