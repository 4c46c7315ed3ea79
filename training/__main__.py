"""`paceline train-draft`: the target writes data, an EAGLE-3 head is trained on it and written."""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from common.model.catalog import ModelNotFound, resolve_model
from common.model.checkpoint import CheckpointError
from common.model.config import ModelConfig, UnsupportedModelError
from common.model.eagle3_checkpoint import read_eagle3
from common.model.eagle3_config import Eagle3Config, default_aux_layers
from common.model.load import load_model, open_checkpoint
from common.model.plan import checkpoint_identity
from common.model.tokenizer import load_tokenizer
from training.data import DataPlan, all_sequences, write_data
from training.evaluation import is_greedy
from training.head import PARAMETERS, initial_weights
from training.options import Options, parse_options
from training.plot import plot_run
from training.shards import DataError, Example
from training.target import RecordingTarget
from training.trainer import METRICS_FILE, Pace, Trainer, TrainPlan, frequent_ids
from training.turns import read_all_turns, read_prompts

log = logging.getLogger("train-draft")

HELD_OUT = 24
"""One user turn in so many is held out, with all of its answers."""
HELD_OUT_ANSWERS = 160
STOPPED = 130
PLOT_FILE = "training.svg"


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 1 for what went wrong, 2 for wrong usage, 130 when it was stopped."""

    options = parse_options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    torch.set_num_threads(options.threads)
    try:
        return _run(options, stop)
    except (ModelNotFound, UnsupportedModelError, CheckpointError, DataError, ValueError, OSError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1


def _run(options: Options, stop: threading.Event) -> int:
    path = resolve_model(options.model).path
    checkpoint = open_checkpoint(path)
    layers = default_aux_layers(checkpoint.config.layers)
    config = head_config(checkpoint.config, options, layers)
    identity = checkpoint_identity(path)
    data = DataPlan(
        options.data,
        options.tokens,
        options.answer_tokens,
        options.seed,
        prompts=None if options.prompts is None else tuple(read_prompts(options.prompts)),
        forbidden=tuple(turn for file in options.exclude for turn in read_all_turns(file)),
    )
    sequences = all_sequences(options.data, model_identity=identity, layers=layers)
    if sum(one.answer_tokens for one in sequences) < options.tokens:
        model = load_model(path, dtype=torch.bfloat16, max_positions=options.max_len)
        target = RecordingTarget(model, layers=layers, sequences=options.lanes, max_len=options.max_len)
        write_data(data, target, load_tokenizer(path), identity, stop)
        del model, target
        if stop.is_set():
            return STOPPED
        sequences = all_sequences(options.data, model_identity=identity, layers=layers)
    if options.data_only:
        return 0
    trained, held = split(sequences)
    if options.start_from is None:
        target_ids = frequent_ids(trained, config.draft_vocab_size, config.vocab_size)
        start = initial_weights(config, checkpoint, target_ids, options.seed)
    else:
        config, target_ids, start = written_head(options.start_from, config)
    plan = TrainPlan(options.steps, options.batch, options.unroll, options.learning_rate, options.seed)
    trainer = Trainer(config, checkpoint, target_ids, start, trained, held, plan, options.out)
    log.info(
        "%d answers (%d tokens) to train on, %d held out; %d steps of %d tokens are %.1f passes",
        len(trained),
        sum(one.answer_tokens for one in trained),
        len(held),
        options.steps,
        options.batch,
        options.steps / trainer.steps_per_epoch,
    )

    def plotted() -> None:
        if (options.out / METRICS_FILE).exists():
            plot_run(options.out / METRICS_FILE, options.out / PLOT_FILE)

    trainer.run(stop, Pace(), plotted)
    return STOPPED if stop.is_set() else 0


def head_config(target: ModelConfig, options: Options, layers: tuple[int, ...]) -> Eagle3Config:
    """A head with the target's widths. Raises UnsupportedModelError."""

    return Eagle3Config(
        vocab_size=target.vocab_size,
        draft_vocab_size=min(options.draft_vocab, target.vocab_size),
        target_hidden_size=target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=options.inner or target.intermediate_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_eps=target.rms_eps,
        rope=target.rope,
        max_context=target.max_context,
        aux_layers=layers,
    )


def written_head(
    directory: Path, wanted: Eagle3Config
) -> tuple[Eagle3Config, torch.Tensor, dict[str, torch.Tensor]]:
    """A head of an earlier run: config, target ids and PARAMETERS. wanted: a config whose shapes it must
    have, but for intermediate size and draft vocabulary. Raises DataError for another."""

    config, weights = read_eagle3(directory)
    same = replace(
        wanted, intermediate_size=config.intermediate_size, draft_vocab_size=config.draft_vocab_size
    )
    if config != same or weights.embed_tokens is not None:
        raise DataError(f"{directory} holds a head of another target or form: {config}, needed is {same}")
    return config, weights.target_ids, {name: getattr(weights, name) for name in PARAMETERS}


def split(sequences: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Those to train on, and greedy answers to turns that none of them answers."""

    trained: list[Example] = []
    held: list[Example] = []
    for one in sequences:
        if int.from_bytes(hashlib.sha256(one.turn.encode()).digest()[:4]) % HELD_OUT:
            trained.append(one)
        elif is_greedy(one):
            held.append(one)
    if not trained:
        raise DataError("there is no data to train on; write more with --tokens")
    return trained, held[:HELD_OUT_ANSWERS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
