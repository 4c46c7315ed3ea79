"""The head in `models/` is what its card says, and drafts for the demo model."""

from __future__ import annotations

import pytest
import torch

from bench.eval_draft import GREEDY, MAX_POSITIONS, Pair
from common.model.catalog import resolve_model
from common.model.eagle3_checkpoint import read_eagle3
from common.model.load import load_model
from common.model.tokenizer import load_tokenizer
from common.settings import Settings
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.drafters.load import SHIPPED_HEADS, load_drafter

MODEL = "smollm2-135m-instruct"
FOLDER = SHIPPED_HEADS / f"{MODEL}-eagle3"
QUESTION = "A baker makes 12 loaves a day and sells each for 3 dollars. How much does he earn in a week?"


def test_it_is_small_and_in_the_published_format() -> None:
    config, weights = read_eagle3(FOLDER)
    assert (FOLDER / "model.safetensors").stat().st_size < 30e6
    assert config.aux_layers == (2, 15, 27)
    assert weights.lm_head.dtype == torch.bfloat16
    assert weights.embed_tokens is None, "the target's embedding is mapped, not shipped again"
    assert "Held-out acceptance" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [1, 4])
def test_a_step_with_it_commits_more_than_one_token_and_a_half(width: int) -> None:
    settings = Settings(model=MODEL, drafter="eagle3", tree_width=width, max_model_len=MAX_POSITIONS)
    drafter = load_drafter(settings)
    assert isinstance(drafter, Eagle3Drafter)
    path = resolve_model(MODEL).path
    tokenizer = load_tokenizer(path)
    template = tokenizer.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": QUESTION}], True)
    model = load_model(path, dtype=torch.bfloat16, max_positions=MAX_POSITIONS)
    ids = tokenizer.encode(text, add_special=False)
    steps = Pair(model, drafter, 4).run(ids, 64, frozenset(tokenizer.eos_ids), GREEDY, GREEDY)
    assert sum(steps) > 1.5 * len(steps)
