"""The head's forward against a plain one, and its files."""

from __future__ import annotations

import json

import pytest
import torch
from eagle3_heads import PLAIN, TARGET_HIDDEN, VARIANTS, VOCAB, PlainDrafter, random_weights
from safetensors.torch import load_file, save_file

from common.attention.segments import build_batch
from common.attention.torch_backend import TorchAttention
from common.model.checkpoint import CheckpointError
from common.model.config import UnsupportedModelError
from common.model.eagle3 import Eagle3Head
from common.model.eagle3_checkpoint import Eagle3Weights, read_eagle3, write_eagle3
from common.model.eagle3_config import default_aux_layers, parse_eagle3_config


@pytest.mark.parametrize("name", VARIANTS)
def test_the_forward_is_that_of_the_format(name):
    config = VARIANTS[name]
    weights = random_weights(config, embedding=name == "plain")
    embedding = torch.randn(VOCAB, config.hidden_size, generator=torch.Generator().manual_seed(1))
    head = Eagle3Head(config, weights, dtype=torch.float32, embedding=embedding, max_positions=64)
    plain = PlainDrafter(config, weights, embedding)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCAB, (10,), generator=generator)
    aux = torch.randn(6, 3 * TARGET_HIDDEN, generator=generator)

    attention = TorchAttention(config.heads, config.kv_heads, config.head_dim)
    keys, values = torch.zeros(2, 64, config.kv_heads, config.head_dim)
    feature = head.fuse(aux)
    got = []
    for step in range(4):
        start = 0 if step == 0 else 5 + step
        positions = torch.arange(start, start + feature.shape[0])
        q, k, v = head.queries_keys_values(feature, ids[positions + 1], positions)
        keys[positions], values[positions] = k, v
        batch = build_batch([Chunk((0,), start, positions.tolist())], [], 64)
        output = head.output(feature, attention.plan(batch).attend(q, keys, values))
        got.append(head.logits(output[-1:])[0])
        feature = head.feature(output[-1:])

    for position in range(6):
        logits, next_feature = plain.step(plain.fuse(aux[position]), int(ids[position + 1]), position)
    torch.testing.assert_close(got[0], logits, rtol=2e-4, atol=2e-5)
    for step in range(1, 4):
        logits, next_feature = plain.step(next_feature, int(ids[6 + step]), 5 + step)
        torch.testing.assert_close(got[step], logits, rtol=2e-4, atol=2e-5)


class Chunk:
    def __init__(self, pages: tuple[int, ...], start: int, ids: list[int]) -> None:
        self.pages, self.start, self.ids = pages, start, ids


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("embedding", [False, True])
def test_a_written_head_is_read_back(tmp_path, name, embedding):
    config = VARIANTS[name]
    weights = random_weights(config, embedding=embedding)
    write_eagle3(tmp_path, config, weights)
    read_config, read = read_eagle3(tmp_path)
    assert read_config == config
    for field in Eagle3Weights.__slots__:
        ours, theirs = getattr(weights, field), getattr(read, field)
        if isinstance(ours, tuple):
            assert len(ours) == len(theirs)
            assert all(map(torch.equal, ours, theirs))
        else:
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), field


def test_the_layer_may_stand_under_either_name(tmp_path):
    write_eagle3(tmp_path, PLAIN, random_weights(PLAIN))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    _, read = read_eagle3(tmp_path)
    assert torch.equal(read.qkv, random_weights(PLAIN).qkv)


def test_t2d_says_what_d2t_says(tmp_path):
    weights = random_weights(PLAIN)
    write_eagle3(tmp_path, PLAIN, weights)
    t2d = load_file(tmp_path / "model.safetensors")["t2d"]
    assert torch.nonzero(t2d).flatten().tolist() == weights.target_ids.tolist()


def published() -> list[str]:
    return sorted(
        name
        for name in (
            "fc.weight", "norm.weight", "lm_head.weight", "d2t", "midlayer.input_layernorm.weight",
            "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
            "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
            "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
            "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", published())
def test_a_missing_or_misshapen_tensor_is_refused_by_name(tmp_path, name):
    write_eagle3(tmp_path, PLAIN, random_weights(PLAIN))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=name):
        read_eagle3(tmp_path)
    save_file({**tensors, name: torch.cat([tensor, tensor])}, path)
    with pytest.raises(CheckpointError, match=name):
        read_eagle3(tmp_path)


def test_what_no_head_has_is_refused_by_name(tmp_path):
    write_eagle3(tmp_path, PLAIN, random_weights(PLAIN))
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({**whole, "midlayer.mlp.up_proj.bias": torch.zeros(20)}, path)
    with pytest.raises(CheckpointError, match=r"up_proj\.bias"):
        read_eagle3(tmp_path)
    save_file({**whole, "fc.weight": whole["fc.weight"].to(torch.int8)}, path)
    with pytest.raises(CheckpointError, match=r"fc\.weight is stored as torch\.int8"):
        read_eagle3(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_eagle3(tmp_path)


@pytest.mark.parametrize(("at", "offset", "said"), [(0, -9, "-9"), (10, 40, "vocabulary"), (3, 0, "twice")])
def test_draft_ids_that_lead_nowhere_are_refused(tmp_path, at, offset, said):
    write_eagle3(tmp_path, PLAIN, random_weights(PLAIN))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    d2t = tensors["d2t"].clone()
    d2t[at] = d2t[at - 1] - 1 if said == "twice" else offset
    save_file({**tensors, "d2t": d2t}, path)
    with pytest.raises(CheckpointError, match=said):
        read_eagle3(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not an EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; a positive number"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0; a positive number"),
        ({"head_dim": "64"}, "head_dim is '64'; a positive integer"),
        ({"eagle_config": [1]}, r"eagle_config is \[1\]; an object"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"draft_vocab_size": 41}, "draft_vocab_size 41 is above vocab_size 40"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, "a list of layer numbers"),
        ({"num_aux_hidden_states": 2}, "3 auxiliary layers are named, the head reads 2"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_name(tmp_path, change, said):
    write_eagle3(tmp_path, PLAIN, random_weights(PLAIN))
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=said):
        parse_eagle3_config({**raw, **change})


def test_layers_are_those_of_the_paper_where_the_config_names_none():
    assert default_aux_layers(30) == (2, 15, 27)
    assert VARIANTS["unnamed-layers"].aux_layers_of(30) == (2, 15, 27)
    assert PLAIN.aux_layers_of(30) == (1, 2, 4)
    with pytest.raises(UnsupportedModelError, match="the target has layers 0 … 3"):
        PLAIN.aux_layers_of(4)
    with pytest.raises(UnsupportedModelError, match="needs 6 or more"):
        default_aux_layers(5)


def test_a_head_of_another_target_is_refused():
    with pytest.raises(ValueError, match="made for another target"):
        Eagle3Head(
            PLAIN,
            random_weights(PLAIN),
            dtype=torch.float32,
            embedding=torch.zeros(VOCAB + 1, 16),
            max_positions=8,
        )
