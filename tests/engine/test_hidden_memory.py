"""Hidden rows and embedding through real shared memory, as target and draft map them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.graphs.padded import padded_rows
from common.memory.handle import HandleError
from common.memory.shared_tensors import HIDDEN_ROWS
from common.messages.lifecycle import Configure, ConfigureDraft, JoinDraft
from common.messages.rounds import HIDDEN_BLOCKS
from common.messages.stamp import Stamp
from common.model.llama import LlamaModel
from services.draft.drafters.ngram import NgramDrafter
from services.draft.eagle.growth import Shape
from services.draft.memory import Mapped
from services.target.memory import Exports, RegionRefused
from tests.engine.eagle_pair import HIDDEN, LAYERS, VOCAB, eagle_drafter, tiny_target

ROWS = 30
STAMP = Stamp(1, 7, 9)
CONFIGURE = Configure(1, 7, 6, 4, 3, 20, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def exports(model: LlamaModel, tmp_path: Path):
    made = Exports(CONFIGURE, model, ROWS, tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def join(capture: tuple[int, ...] = LAYERS, row_bytes: int = 3 * HIDDEN * 2) -> JoinDraft:
    return JoinDraft(STAMP, 32, list(capture), row_bytes)


def configure(manifest: bytes) -> ConfigureDraft:
    return ConfigureDraft(STAMP, "endpoint", manifest, 6, 4, 3, 20, 5)


def test_what_the_target_writes_to_a_block_the_draft_reads(exports: Exports, tmp_path: Path) -> None:
    drafter = eagle_drafter(Shape())
    message = JoinDraft(STAMP, drafter.kv_bytes_per_position, list(LAYERS), drafter.hidden_row_bytes)
    mapped = Mapped(configure(exports.allocate_region(message)), drafter, tmp_path)
    hidden = mapped.shared.hidden
    assert hidden is not None
    assert hidden.rows.shape == (HIDDEN_BLOCKS, padded_rows(ROWS), 3 * HIDDEN), "no room for padding rows"
    block = exports.hidden_block(9, 2)
    assert block is not None
    block.rows[3] = 5.0
    block.tag.fill_(12)
    assert hidden.rows[2, 3].eq(5.0).all()
    assert hidden.tags.tolist() == [0, 0, 12, 0]
    mapped.detach()


def test_the_draft_reads_the_embedding_that_the_target_reads(
    exports: Exports, model: LlamaModel, tmp_path: Path
) -> None:
    drafter = eagle_drafter(Shape())
    message = JoinDraft(STAMP, drafter.kv_bytes_per_position, list(LAYERS), drafter.hidden_row_bytes)
    mapped = Mapped(configure(exports.allocate_region(message)), drafter, tmp_path)
    assert mapped.shared.hidden is not None
    assert exports.embedding is not None
    assert torch.equal(mapped.shared.hidden.embedding, model.embedding)
    exports.embedding[3, 4] = 2.5
    assert float(mapped.shared.hidden.embedding[3, 4]) == 2.5
    mapped.detach()


def test_the_draft_cannot_write_what_it_only_reads(exports: Exports, tmp_path: Path) -> None:
    """In a process of its own: the operating system ends who tries."""
    drafter = eagle_drafter(Shape())
    message = JoinDraft(STAMP, drafter.kv_bytes_per_position, list(LAYERS), drafter.hidden_row_bytes)
    manifest = tmp_path.parent / "manifest"
    manifest.write_bytes(exports.allocate_region(message))
    code = f"""
from pathlib import Path
from services.draft.eagle.growth import Shape
from services.draft.memory import Mapped
from tests.engine.eagle_pair import eagle_drafter
from tests.engine.test_hidden_memory import configure
manifest = Path({str(manifest)!r}).read_bytes()
mapped = Mapped(configure(manifest), eagle_drafter(Shape()), Path({str(tmp_path)!r}))
print("mapped", flush=True)
mapped.shared.hidden.rows[0, 0, 0] = 1.0
print("written", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ended.stdout == "mapped\n", ended.stderr
    assert ended.returncode == -11


def test_a_drafter_that_reads_nothing_gets_no_rows_and_costs_no_memory(
    exports: Exports, model: LlamaModel, tmp_path: Path
) -> None:
    before = model.embedding.data_ptr()
    mapped = Mapped(
        configure(exports.allocate_region(JoinDraft(STAMP, 0))), NgramDrafter(VOCAB, "t"), tmp_path
    )
    assert mapped.shared.hidden is None
    assert exports.hidden_block(9, 0) is None
    assert exports.embedding is None
    assert model.embedding.data_ptr() == before
    mapped.detach()


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (join(row_bytes=3 * 64 * 2), "384 bytes from 3 layers; this target's have 576"),
        (join(capture=(0, 1), row_bytes=3 * HIDDEN * 2), "576 bytes from 2 layers; this target's have 384"),
        (join(capture=(0, 1, 2)), "layer 2; this target has layers 0 … 1"),
        (join(capture=(0, 1, -1)), "layer -1"),
    ],
)
def test_a_head_made_for_another_target_is_refused(exports: Exports, message: JoinDraft, told: str) -> None:
    with pytest.raises(RegionRefused, match=told):
        exports.allocate_region(message)
    assert exports.hidden_block(9, 0) is None


def test_rows_of_another_width_are_refused_by_the_draft(exports: Exports, tmp_path: Path) -> None:
    drafter = eagle_drafter(Shape())
    message = JoinDraft(STAMP, drafter.kv_bytes_per_position, list(LAYERS[:2]), 2 * HIDDEN * 2)
    with pytest.raises(HandleError, match=HIDDEN_ROWS):
        Mapped(configure(exports.allocate_region(message)), drafter, tmp_path)


def test_the_rows_of_a_draft_go_with_its_region(exports: Exports, tmp_path: Path) -> None:
    exports.allocate_region(join())
    names = {path.name for path in tmp_path.iterdir()}
    exports.allocate_region(JoinDraft(Stamp(1, 7, 10), 32))
    assert exports.hidden_block(9, 0) is None
    gone = names - {path.name for path in tmp_path.iterdir()}
    assert len(gone) == 2, "the region and the rows"
