"""`paceline train-draft` from a model's files to a written head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tokenizers
import transformers
from tiny_models import llama
from tokenizers import decoders, models, pre_tokenizers

from common.model.eagle3_checkpoint import read_eagle3
from training.plot import plot_run

ROOT = Path(__file__).parents[2]
VOCAB = 260


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A random model of bytes."""

    directory = tmp_path_factory.mktemp("target")
    config = llama(num_hidden_layers=6, vocab_size=VOCAB, eos_token_id=VOCAB - 1)
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    template = "[{% for message in messages %}{{ message['content'] }}{% endfor %}]"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "training", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_command_writes_data_and_a_head(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'"Say what comes after number {n}."' for n in range(48)))
    out, data = tmp_path / "out", tmp_path / "data"
    sizes = ("--lanes", 8, "--max-len", 128, "--answer-tokens", 20, "--draft-vocab", 50, "--threads", 1)
    steps = ("--steps", 4, "--batch", 60, "--unroll", 2)
    files = ("--model", target, "--out", out, "--data", data, "--prompts", prompts)
    done = train(*files, *sizes, *steps, "--inner", 32)
    assert done.returncode == 0, done.stderr
    config, weights = read_eagle3(out / "head")
    assert (config.vocab_size, config.draft_vocab_size, config.intermediate_size) == (VOCAB, 50, 32)
    assert config.aux_layers == (2, 3, 3)
    assert weights.embed_tokens is None
    assert "tokens per step" in done.stderr
    assert "min left" in done.stderr
    ElementTree.parse(out / "training.svg")


def test_what_cannot_be_trained_is_refused_in_one_line(target, tmp_path):
    refused = train("--model", tmp_path / "nowhere", "--out", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("paceline: model ")
    assert refused.stderr.count("\n") == 1


def test_the_plot_has_a_line_for_every_draft_position(tmp_path):
    notes = [
        {"step": 1, "loss": 9.0, "agreement": [0.1, 0.1], "trained_s": 1.0},
        {"step": 2, "reach": [0.3, 0.1, 0.0], "tokens_per_step": 1.4},
        {"step": 4, "loss": 3.0, "agreement": [0.4, 0.3], "trained_s": 4.0},
        {"step": 4, "reach": [0.5, 0.25, 0.1], "tokens_per_step": 1.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "plot.svg")
    drawn = ElementTree.parse(tmp_path / "plot.svg").getroot()
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert [len(one.attrib["points"].split()) for one in lines] == [2, 2, 2, 2]
    (tmp_path / "metrics.jsonl").write_text("")
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "plot.svg")
    assert "nothing measured" in (tmp_path / "plot.svg").read_text()
