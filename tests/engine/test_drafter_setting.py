"""What `--drafter` names, and what is said when it cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.service import StartupError
from common.settings import Settings
from services.draft.drafters import load as load_module
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.drafters.load import load_drafter
from services.draft.drafters.lookup_first import LookupFirst
from services.draft.drafters.ngram import NgramDrafter
from services.draft.eagle.growth import Shape
from services.draft.work import DraftRow, Drafts, DraftWork, HiddenRows
from tests.engine.eagle_head import write_random_head
from tests.engine.eagle_pair import GREEDY, VOCAB, eagle_drafter
from tests.engine.tiny_models import write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_hf("smollm2", folder)
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_head(tmp_path_factory.mktemp("models") / "head")


def load(model: Path | str, drafter: str, **other: object) -> object:
    return load_drafter(Settings(model=str(model), drafter=drafter, max_model_len=64, **other))


def test_a_model_without_a_head_of_its_own_says_what_else_there_is(model: Path) -> None:
    with pytest.raises(
        StartupError, match=r"no head ships for tiny \(.*models/tiny-eagle3 is not there\).*ngram"
    ):
        load(model, "eagle3")


def test_auto_takes_the_head_that_ships_and_lookup_where_there_is_none(
    model: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "SHIPPED_HEADS", tmp_path)
    assert Settings().drafter == "auto"
    assert isinstance(load("smollm2-135m-instruct", "auto"), NgramDrafter)
    (tmp_path / "smollm2-135m-instruct-eagle3").symlink_to(head)
    assert isinstance(load("smollm2-135m-instruct", "auto"), LookupFirst)
    assert isinstance(load("smollm2-135m-instruct", "eagle3"), Eagle3Drafter)
    assert isinstance(load("smollm2-135m-instruct", "eagle3+ngram"), LookupFirst)


def test_a_head_for_another_target_is_refused_with_both_sizes(model: Path, head: Path) -> None:
    with pytest.raises(StartupError, match="hidden size 576 and 49152 ids; tiny has 63 and 131"):
        load(model, str(head))


def test_a_head_of_another_kind_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle"]}))
    with pytest.raises(StartupError, match="LlamaForCausalLMEagle head; LlamaForCausalLMEagle3 heads are"):
        load(model, str(tmp_path))


def test_only_a_head_takes_lookup_first(model: Path) -> None:
    with pytest.raises(StartupError, match=r"is no EAGLE-3 head; only heads take '\+ngram'"):
        load(model, f"{model}+ngram")


def test_a_path_is_loaded_for_the_demo_model_and_reads_the_layers_of_the_rule(head: Path) -> None:
    drafter = load("smollm2-135m-instruct", str(head), tree_width=3)
    assert isinstance(drafter, Eagle3Drafter)
    assert (drafter.capture, drafter.hidden_row_bytes) == ((2, 15, 27), 3 * 576 * 2)
    assert drafter._shape == Shape(width=3)
    assert drafter._positions == 64
    both = load("smollm2-135m-instruct", f"{head}+ngram")
    assert isinstance(both, LookupFirst)
    assert (both.name, both.capture) == ("head+ngram", (2, 15, 27))


def test_lookup_goes_first_row_by_row_and_the_head_reads_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    head = eagle_drafter(Shape())
    asked: list[DraftWork] = []

    def spy(work: DraftWork) -> Drafts:
        asked.append(work)
        return Drafts((), ("stale",))

    monkeypatch.setattr(head, "draft", spy)
    both = LookupFirst(NgramDrafter(VOCAB, "t", shortest_n=3), head)
    read = (HiddenRows(0, 1, 0, 1, 4),)
    rows = (
        DraftRow(1, (1, 1), (1, 2, 3, 4, 1, 2, 3), 0, 20, 4, GREEDY, read),
        DraftRow(2, (2, 1), (1, 2, 3, 4, 5, 6, 7), 0, 20, 4, GREEDY, read),
    )
    drafts = both.draft(DraftWork(0, 1, rows, (3,)))
    assert [tree.slot for tree in drafts.trees] == [1]
    assert drafts.trees[0].tokens == (3, 4, 1, 2, 3)
    assert drafts.faults == ("stale",)
    assert [(row.slot, row.k, row.hidden) for row in asked[0].rows] == [(1, 0, read), (2, 4, read)]
    assert asked[0].released == (3,)
