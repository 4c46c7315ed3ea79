"""The `paceline` command. Commands that run models hand over to the services of a checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from paceline import DEFAULT_ADDRESS, __version__

SERVICE_COMMANDS = {
    "serve": "services.supervisor",
    "train-draft": "training",
    "eval-draft": "bench.eval_draft",
}
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for what went wrong, 2 for wrong usage, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SERVICE_COMMANDS:
        return _run_service(arguments[0], arguments[1:])
    parsed = _parser().parse_args(arguments)
    return _run(parsed)


def _run(arguments: argparse.Namespace) -> int:
    from paceline.errors import PacelineError

    if arguments.command == "chat":
        from paceline.chat import run
    else:
        from paceline.generate import run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader left, as `head` does. What Python would still flush at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline", description="Client of a Paceline server, and its start from a checkout."
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument("--stats", action="store_true", help="print numbers to standard error at the end")
    chat = commands.add_parser("chat", help="talk to the model", description="Talk to the model.")
    chat.add_argument("--system", help="system message that opens the conversation")
    for command in (generate, chat):
        _add_request_options(command)
    commands.add_parser(
        "serve", help="run a server (needs a checkout or the container image)", add_help=False
    )
    commands.add_parser(
        "train-draft", help="train a drafter (needs a checkout or the container image)", add_help=False
    )
    commands.add_parser(
        "eval-draft", help="tokens per step of a drafter, by category (needs a checkout)", add_help=False
    )
    return parser


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="ZeroMQ address (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens (default: what fits)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, metavar="S", help="repeats a generation (default: drawn)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="longest time of a generation")


def _run_service(command: str, arguments: list[str]) -> int:
    """Becomes the service, with its arguments untouched. 2 if this installation has no services."""
    module = SERVICE_COMMANDS[command]
    root = str(Path(__file__).resolve().parent.parent)
    if not _is_there(module, [root, *sys.path]):
        print(
            f"paceline: `{command}` runs models, and this installation is the client alone: use a checkout of"
            f" Paceline (`make serve` there, or `.venv/bin/paceline {command}`), or its container image.",
            file=sys.stderr,
        )
        return 2
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)


def _is_there(module: str, paths: Sequence[str] | None) -> bool:
    """Looks along `paths` without running the packages on the way."""
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, paths)
        if spec is None:
            return False
        paths = spec.submodule_search_locations
    return True


if __name__ == "__main__":
    sys.exit(main())
