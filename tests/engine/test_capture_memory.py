"""What a drafter that reads the target's states costs a prefill in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from common.graphs.steps import CapturedSteps
from common.messages.lifecycle import Configure
from common.model.llama import LlamaModel
from common.model.load import build_model, load_model, open_checkpoint
from services.target.memory import HiddenBlock
from services.target.runner import TargetRunner
from services.target.work import Capture, PrefillChunk, RoundWork
from tests.engine.tiny_models import write_hf

ROWS, SLOTS, PAGE = 512, 4, 128
HIDDEN, LAYERS = 96, (0, 1, 1)
ALLOWED_BYTES = 64 << 10
CHUNKS = tuple(
    PrefillChunk(slot, (1 + slot,), 0, tuple((slot + at) % 131 for at in range(PAGE)))
    for slot in range(SLOTS)
)
"""Four prompts, together as many rows as the gateway asks for in one forward."""


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    directory = tmp_path_factory.mktemp("llama2")
    write_hf("llama2", directory)
    if request.param == "torch":
        return build_model(open_checkpoint(directory), dtype=torch.bfloat16, max_positions=PAGE)
    made = load_model(directory, dtype=torch.bfloat16, max_positions=PAGE)
    assert isinstance(made.steps, CapturedSteps)
    return made


def test_a_prefill_that_captures_allocates_nothing_beside_the_shared_rows(model: LlamaModel) -> None:
    runner = TargetRunner(model, vocab_size=131)
    runner.allocate(Configure(1, 1, 1 + SLOTS, PAGE, SLOTS, PAGE, 1))
    rows = torch.zeros(ROWS, len(LAYERS) * HIDDEN, dtype=torch.bfloat16)
    block = HiddenBlock(rows, torch.zeros(1, dtype=torch.int64))
    plain, capturing = RoundWork(0, 1, CHUNKS, ()), RoundWork(0, 2, CHUNKS, (), Capture(1, 0, LAYERS))
    runner.execute(plain)
    peak, in_all = allocated_bytes(lambda: runner.execute(plain))
    assert peak > rows.nbytes > 4 * ALLOWED_BYTES, "a copy of the rows would not show"
    runner.execute(capturing, block)
    peak_capturing, in_all_capturing = allocated_bytes(lambda: runner.execute(capturing, block))
    assert rows.unflatten(1, (-1, HIDDEN)).any(-1).all(), "a row was not captured"
    assert peak_capturing <= peak + ALLOWED_BYTES
    assert in_all_capturing <= in_all + ALLOWED_BYTES, "a copy that the peak does not show"


def allocated_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes that torch holds for work at its peak, and bytes that it hands out in all."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = peak = in_all = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
        in_all += max(0, event.nbytes())
    return peak, in_all
