"""What the head that ships costs: the draft's device work of a round, extend included, with its weights out
of the caches, as the target leaves them."""

from __future__ import annotations

import time
from statistics import median

import torch

from bench.peers import DEMO_MODEL
from common.kv.lengths import pages_for
from common.model.catalog import resolve_model
from common.model.load import load_model
from common.sampling.params import SamplingParams
from common.settings import Settings
from services.draft.drafters.base import HiddenStates, SharedState
from services.draft.drafters.load import load_drafter
from services.draft.work import DraftRow, DraftWork, HiddenRows

PAGE_SIZE = 16
CONTEXT = 400
COMMITTED = 2
"""Tokens of the verdict that is extended over."""
SLOTS = (1, 8)
NODES = (0, 1, 2, 4, 8)
WIDTHS = (1, 4)
COLD_BYTES = 128 << 20


class _Rounds:
    """A drafter over memory of its own, with CONTEXT committed tokens in each slot."""

    def __init__(self, width: int, embedding: torch.Tensor) -> None:
        settings = Settings(model=DEMO_MODEL, drafter="eagle3", tree_width=width, max_model_len=4 * CONTEXT)
        self._drafter = load_drafter(settings)
        each, slots = pages_for(2 * CONTEXT, PAGE_SIZE), max(SLOTS)
        table = torch.arange(1, 1 + (slots + 1) * each, dtype=torch.int32).view(slots + 1, each)
        pages = int(table.max()) + 1
        kv = torch.zeros(pages * PAGE_SIZE * self._drafter.kv_bytes_per_position, dtype=torch.uint8)
        states = self._drafter.hidden_row_bytes // torch.bfloat16.itemsize
        rows = torch.randn(1, slots * CONTEXT, states, generator=torch.Generator().manual_seed(1)).bfloat16()
        hidden = HiddenStates(rows, torch.ones(1, dtype=torch.int64), embedding)
        self._drafter.attach(SharedState(table, kv, hidden, pages, PAGE_SIZE, 2 * CONTEXT, 9))
        self._ids = tuple(range(100, 100 + CONTEXT))
        self._work(slots, 1, CONTEXT - 1, 0)

    def _work(self, slots: int, start: int, count: int, k: int) -> None:
        """Extends over count entries from start on, and drafts."""
        rows = tuple(
            DraftRow(
                slot, (slot, 1), self._ids, start, 2 * CONTEXT, k, SamplingParams(),
                (HiddenRows(0, 1, slot * CONTEXT - count, count, start - 1),),
            )
            for slot in range(1, slots + 1)
        )  # fmt: skip
        self._drafter.draft(DraftWork(0, 1, rows, ()))

    def median_ms(self, slots: int, k: int, repeats: int) -> float:
        cold = torch.zeros(COLD_BYTES, dtype=torch.uint8)
        times = []
        for _ in range(repeats):
            cold.add_(1)
            started = time.perf_counter()
            self._work(slots, CONTEXT - COMMITTED, COMMITTED, k)
            times.append(time.perf_counter() - started)
        return 1e3 * median(times[1:] or times)


def draft_costs(repeats: int) -> None:
    model = load_model(resolve_model(DEMO_MODEL).path, dtype=torch.bfloat16, max_positions=CONTEXT)
    print("| slots | tree width | " + " | ".join(f"k {k}, ms" for k in NODES) + " |")
    print("|---" * (2 + len(NODES)) + "|")
    for width in WIDTHS:
        rounds = _Rounds(width, model.embedding)
        for slots in SLOTS:
            cells = " | ".join(f"{rounds.median_ms(slots, k, repeats):.2f}" for k in NODES)
            print(f"| {slots} | {width} | {cells} |", flush=True)
