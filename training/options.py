"""Command line of `paceline train-draft`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.model.catalog import cache_home

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Options:
    """As the command line's help says. data, out: folders. threads: of the device work."""

    model: str
    out: Path
    data: Path
    tokens: int
    answer_tokens: int
    lanes: int
    max_len: int
    prompts: Path | None
    exclude: tuple[Path, ...]
    data_only: bool
    start_from: Path | None
    steps: int
    batch: int
    unroll: int
    learning_rate: float
    draft_vocab: int
    inner: int
    threads: int
    seed: int


def parse_options(arguments: Sequence[str]) -> Options:
    """Ends the process with status 2 and one line for what is wrong."""

    parser = argparse.ArgumentParser(
        prog="paceline train-draft",
        description="Train an EAGLE-3 head for a model: the model writes the data, the head learns to predict"
        " it. Can be stopped (Ctrl-C, SIGTERM) and started again at any time: it goes on where it was.",
    )
    text, number = parser.add_argument, _add_number
    text(
        "--model",
        default=DEFAULT_MODEL,
        help="known name, Hugging Face directory or .gguf file (%(default)s)",
    )
    text("--out", type=Path, required=True, metavar="DIR", help="where head, checkpoints and metrics go")
    text("--data", type=Path, metavar="DIR", help="where the written data is kept (default: in the cache)")
    text("--prompts", type=Path, metavar="FILE", help="JSONL of user turns to answer instead of own ones")
    text(
        "--exclude",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSONL of prompts that must not be trained on, such as those of a benchmark; may be repeated",
    )
    number(parser, "--tokens", 500_000, 1, "answer tokens to write in all")
    number(parser, "--answer-tokens", 256, 16, "longest answer that is written")
    number(parser, "--lanes", 64, 1, "sequences written at once")
    number(parser, "--max-len", 1024, 64, "longest conversation, in tokens")
    text("--data-only", action="store_true", help="write the data and train nothing")
    text("--start-from", type=Path, metavar="DIR", help="a written head to begin with, and its draft ids")
    number(parser, "--steps", 1200, 1, "optimisation steps")
    number(parser, "--batch", 1024, 1, "answer tokens of a step")
    number(parser, "--unroll", 4, 1, "draft steps that are trained, each on what the one before it made")
    text("--learning-rate", type=float, default=2e-3, metavar="R", help="highest learning rate (%(default)s)")
    number(parser, "--draft-vocab", 8192, 1, "ids that the head can draft: the most frequent ones")
    number(parser, "--inner", 0, 0, "intermediate size of the head; 0 takes the model's")
    number(parser, "--threads", os.cpu_count() or 1, 1, "threads")
    number(parser, "--seed", 1, 0, "of everything that is drawn")
    parsed = parser.parse_args(arguments)
    for path in [parsed.prompts, *parsed.exclude]:
        if path is not None and not path.is_file():
            parser.error(f"{path} does not exist")
    if not 0 < parsed.learning_rate < 1:
        parser.error(f"--learning-rate is {parsed.learning_rate}; it must lie between 0 and 1")
    if parsed.answer_tokens >= parsed.max_len:
        parser.error(f"--answer-tokens {parsed.answer_tokens} does not fit --max-len {parsed.max_len}")
    values = vars(parsed)
    values["exclude"] = tuple(parsed.exclude)
    values["data"] = parsed.data or cache_home() / "train" / Path(parsed.model).name
    return Options(**values)


def _add_number(parser: argparse.ArgumentParser, name: str, default: int, least: int, meaning: str) -> None:
    def whole(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    parser.add_argument(name, type=whole, default=default, metavar="N", help=f"{meaning} ({default})")
