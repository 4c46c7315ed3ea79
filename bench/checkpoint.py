"""The demo model as a Hugging Face directory, for the peers that serve no bfloat16 from a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.model.catalog import resolve_model
from common.model.checkpoint import expected_shapes
from common.model.config import ModelConfig
from common.model.load import open_checkpoint
from common.model.tokenizer_gguf import read_gguf


def write_checkpoint(model: str, folder: Path) -> None:
    """The weights that Paceline serves, dequantised to bfloat16; nothing is done if they are there."""
    if folder.exists():
        return
    path = resolve_model(model).path
    checkpoint = open_checkpoint(path)
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    weights = {
        name: checkpoint.tensor(name).to(torch.bfloat16).contiguous()
        for name in expected_shapes(checkpoint.config)
    }
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "config.json").write_text(json.dumps(_config(checkpoint.config), indent=1))
    _write_tokenizer(path, checkpoint.config, scratch)
    scratch.rename(folder)


def _config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.qkv_bias,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0],
        "pad_token_id": config.eos_ids[0],
    }


def _write_tokenizer(gguf: Path, config: ModelConfig, folder: Path) -> None:
    parts = read_gguf(gguf)
    parts.backend.save(str(folder / "tokenizer.json"))
    eos = parts.backend.id_to_token(config.eos_ids[0])
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": parts.chat_template.source if parts.chat_template else None,
        "bos_token": parts.backend.id_to_token(config.bos_id) if config.bos_id is not None else None,
        "eos_token": eos,
        "pad_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
