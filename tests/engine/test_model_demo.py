"""The demo model's text against transformers' on the same dequantised weights, and bfloat16 against
float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from sequences import Chain, empty_cache, greedy, pages_for, run

from common.model.checkpoint import expected_shapes
from common.model.llama import LlamaModel
from common.model.load import load_model, open_checkpoint
from common.model.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
COUNT, STEPS = 20, 64
# Long questions are cut, so that the float32 prefill stays short.
MOST_PROMPT_IDS = 64
NEAR_TIE = 0.25
"""Margin of float32 logits, of some ±25, within which bfloat16's eight bits may choose another token."""


@dataclass(frozen=True)
class Greedy:
    """ids: [prompts][steps]. best: [steps, prompts, 16, 2], logit and id."""

    ids: list[list[int]]
    best: torch.Tensor


@pytest.fixture(scope="module")
def prompts(demo_gguf: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(demo_gguf)
    turns = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", False)
    starts = [tokenizer.encode(f"<|im_start|>user\n{turn}", False) for turn in turns[-COUNT:]]
    return [ids[:MOST_PROMPT_IDS] + end for ids in starts]


@pytest.fixture(scope="module")
def float32(demo_gguf: Path) -> LlamaModel:
    return load_model(demo_gguf, dtype=torch.float32, max_positions=512)


@pytest.fixture(scope="module")
def float32_greedy(float32: LlamaModel, prompts: list[list[int]]) -> Greedy:
    return Greedy(*greedy(float32, prompts, STEPS))


@pytest.fixture(scope="module")
def reference(demo_gguf: Path) -> transformers.LlamaForCausalLM:
    checkpoint = open_checkpoint(demo_gguf)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {name: checkpoint.tensor(name) for name in expected_shapes(checkpoint.config)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert not unexpected
    return model


def test_the_config_of_the_file_is_read(float32: LlamaModel) -> None:
    config = float32.config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.max_context, config.rope.theta) == (49152, 8192, 100000.0)
    assert (config.eos_ids, config.bos_id, config.tied_embeddings) == ((2,), 1, True)


def test_float32_logits_equal_those_of_transformers(
    float32: LlamaModel, reference: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    for ids in prompts[:3]:
        cache = empty_cache(float32, 256)
        ours = run(float32, cache, [Chain(pages_for(len(ids)), 0, ids)]).logits
        with torch.no_grad():
            theirs = reference(torch.tensor([ids])).logits[0]
        assert (ours - theirs).abs().max() / theirs.abs().max() <= 1e-4


def test_float32_greedy_text_equals_that_of_transformers(
    float32_greedy: Greedy, reference: transformers.LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[2] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.no_grad():
        # No token ends it: texts are compared over all steps.
        theirs = reference.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )[:, longest:]
    assert theirs.shape == (COUNT, STEPS)
    assert float32_greedy.ids == theirs.tolist()


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_served_text_leaves_that_of_float32_at_near_ties_only(
    weights: str, demo_gguf: Path, float32_greedy: Greedy, prompts: list[list[int]]
) -> None:
    model = load_model(demo_gguf, dtype=torch.bfloat16, max_positions=512, weights=weights)
    texts, _ = greedy(model, prompts, STEPS)
    agreed = 0
    for prompt, (text, expected) in enumerate(zip(texts, float32_greedy.ids, strict=True)):
        first = next((at for at in range(STEPS) if text[at] != expected[at]), STEPS)
        agreed += first
        if first == STEPS:
            continue
        logits, ids = float32_greedy.best[first, prompt].unbind(-1)
        chosen = (ids == text[first]).nonzero().flatten()
        margin = float(logits[0] - logits[chosen[0]]) if len(chosen) else float("inf")
        print(f"prompt {prompt}: leaves at token {first}, float32 margin {margin:.3f}")
        assert margin <= NEAR_TIE
    print(f"agreed {agreed} of {COUNT * STEPS}")
    assert agreed >= COUNT * STEPS // 3
