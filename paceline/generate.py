"""`paceline generate`: one prompt, its text on standard output."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paceline.render import Painter, statistics
from paceline.sync import Client


def run(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    out = Painter(sys.stdout, colour=False)
    with (
        Client(arguments.address) as client,
        client.generate(prompt, **sampling(arguments)) as stream,
    ):
        for chunk in stream:
            out.chunk(chunk)
        print(flush=True)
        if arguments.stats:
            print(statistics(stream.final), file=sys.stderr)
    return 0


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameters of `Client.generate` that the command line gave."""
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "ignore_eos",
        "timeout_s",
    )
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
