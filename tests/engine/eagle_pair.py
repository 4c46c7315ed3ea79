"""A tiny target and a random EAGLE head side by side over the tensors that two processes would share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.kernels.decoder_cpu import BLOCK_INPUTS
from common.messages.lifecycle import Configure
from common.messages.rounds import HIDDEN_BLOCKS, hidden_block
from common.model.config import RopeConfig
from common.model.eagle3_checkpoint import Eagle3Weights
from common.model.eagle3_config import Eagle3Config
from common.model.llama import LlamaModel
from common.model.load import load_model
from common.sampling.params import SamplingParams
from services.draft.drafters.base import HiddenStates, SharedState
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.eagle.growth import Shape
from services.draft.work import DraftRow, Drafts, DraftWork, HiddenRows
from services.target.memory import HiddenBlock
from services.target.runner import TargetRunner
from services.target.work import Capture, HiddenSpan, PrefillChunk, RoundWork, TreeRows
from tests.engine.tiny_models import random_model

VOCAB = 131
HIDDEN = 96
DRAFT_VOCAB = 96
PAGE = 4
PAGES = 64
POSITIONS = 80
ROWS = 64
LAYERS = (0, 1, 1)
SLOT_PAGES = {1: tuple(range(40, 20, -1)), 2: tuple(range(41, 61))}
GREEDY = SamplingParams()

Ids = tuple[int, ...]


def tiny_target(folder: Path) -> LlamaModel:
    random_model("llama2").save_pretrained(folder)
    return load_model(folder, dtype=torch.bfloat16, max_positions=POSITIONS)


def random_head(target_hidden: int = HIDDEN, seed: int = 0) -> tuple[Eagle3Config, Eagle3Weights]:
    """Every weight is random, and the same when it is held in 8 bits; the draft vocabulary is every id but
    some."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads, kv_heads, head_dim = target_hidden, 64, 4, 2, 16
    config = Eagle3Config(
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        target_hidden_size=target_hidden,
        hidden_size=hidden,
        intermediate_size=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_context=256,
        aux_layers=LAYERS,
    )

    def normal(*shape: int) -> torch.Tensor:
        quants = (51 * torch.randn(shape, generator=generator)).round().clamp(-127, 127)
        quants[:, ::BLOCK_INPUTS] = 127.0
        return (quants / 256).bfloat16()

    def norm() -> torch.Tensor:
        return (1 + 0.3 * torch.randn(hidden, generator=generator)).bfloat16()

    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    weights = Eagle3Weights(
        fc=normal(hidden, 3 * target_hidden),
        input_layernorm=norm(),
        hidden_norm=norm(),
        qkv=normal((heads + 2 * kv_heads) * head_dim, 2 * hidden),
        output=normal(hidden, heads * head_dim),
        post_attention_layernorm=norm(),
        gate_up=normal(2 * inner, hidden),
        down=normal(hidden, inner),
        norm=norm(),
        lm_head=normal(DRAFT_VOCAB, hidden),
        d2t=ids - torch.arange(DRAFT_VOCAB),
    )
    return config, weights


def eagle_drafter(shape: Shape, positions: int = POSITIONS, patience: int = 0) -> Eagle3Drafter:
    config, weights = random_head()
    return Eagle3Drafter(
        "eagle3",
        config,
        weights,
        layers=LAYERS,
        vocab_size=VOCAB,
        tokenizer="t",
        positions=positions,
        shape=shape,
        patience=patience,
    )


@dataclass
class Slot:
    """ids: committed and foreseen. unread: hidden rows that no draft work was given yet. handed: as in
    DraftLog."""

    ids: Ids
    sampling: SamplingParams
    unread: list[HiddenRows] = field(default_factory=list)
    handed: Ids = ()


class Pair:
    """Rounds of one group on both devices, without the protocol around them."""

    def __init__(self, model: LlamaModel, drafter: Eagle3Drafter) -> None:
        self.runner = TargetRunner(model, VOCAB)
        self.runner.allocate(Configure(1, 1, PAGES, PAGE, 4, POSITIONS, 9))
        self.pages = dict(SLOT_PAGES)
        table = torch.zeros(4, POSITIONS // PAGE, dtype=torch.int32)
        for slot, pages in SLOT_PAGES.items():
            table[slot] = torch.tensor(pages)
        width = len(LAYERS) * model.config.hidden_size
        self.rows = torch.full((HIDDEN_BLOCKS, ROWS, width), float("nan"), dtype=torch.bfloat16)
        self.tags = torch.zeros(HIDDEN_BLOCKS, dtype=torch.int64)
        kv = torch.full((PAGES * PAGE * drafter.kv_bytes_per_position,), 0xFF, dtype=torch.uint8)
        for half in kv.view(2, PAGES, -1):
            half[0] = 0
        self.table = table
        self.kv = kv
        hidden = HiddenStates(self.rows, self.tags, model.embedding)
        self.shared = SharedState(table, kv, hidden, PAGES, PAGE, POSITIONS, 9)
        self.drafter = drafter
        drafter.attach(self.shared)
        self.round = 0
        self.slots: dict[int, Slot] = {}

    def use_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        self.pages[slot] = pages
        self.table[slot] = torch.tensor(pages)

    def prefill_chunk(
        self, slot: int, ids: Ids, chunk: tuple[int, int], sampling: SamplingParams = GREEDY
    ) -> None:
        """Compute one chunk of a prompt, and capture it."""
        self.slots.setdefault(slot, Slot(ids, sampling))
        start, end = chunk
        self._execute((PrefillChunk(slot, self.pages[slot], start, ids[start:end]),), (), capture=True)

    def verify(self, trees: dict[int, tuple[Ids, Ids]], capture: bool = True) -> dict[int, Ids]:
        """trees: tokens and parents by slot, roots included. The ids that every slot gets."""
        work = tuple(
            TreeRows(
                slot,
                self.pages[slot],
                len(self.slots[slot].ids),
                tokens,
                parents,
                self.slots[slot].sampling,
            )
            for slot, (tokens, parents) in trees.items()
        )
        return self._execute((), work, capture)

    def _execute(
        self, chunks: tuple[PrefillChunk, ...], trees: tuple[TreeRows, ...], capture: bool
    ) -> dict[int, Ids]:
        self.round += 1
        block = hidden_block(0, self.round)
        wanted = Capture(1, block, LAYERS) if capture else None
        result = self.runner.execute(
            RoundWork(0, self.round, chunks, trees, wanted),
            HiddenBlock(self.rows[block], self.tags[block : block + 1]) if capture else None,
        )
        ends = {chunk.slot: chunk.start + len(chunk.ids) for chunk in chunks}
        for tree in result.trees:
            ends[tree.slot] = len(self.slots[tree.slot].ids) + len(tree.ids) - 1
            self.slots[tree.slot].ids += tree.ids
        for span in result.hidden:
            self._note(block, span, ends[span.slot])
        return {tree.slot: tree.ids for tree in result.trees}

    def _note(self, block: int, span: HiddenSpan, end: int) -> None:
        rows = HiddenRows(block, self.round, span.first, span.count, end - span.count)
        self.slots[span.slot].unread.append(rows)

    def draft(self, *slots: int, k: int = 4, allocated: int = POSITIONS) -> Drafts:
        rows = tuple(self.row(slot, k, allocated) for slot in slots)
        return self.drafter.draft(DraftWork(0, self.round + 1, rows, ()))

    def row(self, slot: int, k: int, allocated: int = POSITIONS) -> DraftRow:
        one = self.slots[slot]
        unread, one.unread = tuple(one.unread), []
        agreed = next(
            (at for at, (a, b) in enumerate(zip(one.ids, one.handed, strict=False)) if a != b),
            min(len(one.ids), len(one.handed)),
        )
        one.handed = one.ids
        return DraftRow(slot, (slot, 1), one.ids, agreed, allocated, k, one.sampling, unread)

    def trees(self, *slots: int, k: int = 4) -> dict[int, tuple[Ids, Ids]]:
        """What is drafted, and the roots alone where nothing is."""
        drafted = {tree.slot: (tree.tokens, tree.parents) for tree in self.draft(*slots, k=k).trees}
        return {slot: drafted.get(slot, (self.slots[slot].ids[-1:], (-1,))) for slot in slots}


def prompt(seed: int = 7, length: int = 21) -> Ids:
    chooser = random.Random(seed)
    return tuple(chooser.randrange(3, VOCAB) for _ in range(length))
