"""The `paceline` command against a real front on a fake engine."""

import io
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from zmq_harness import Server

import paceline
from paceline import Client, cli
from paceline.chat import Conversation, converse
from paceline.render import DRAFT_COLOUR, PLAIN, Painter, painted, summary, wants_colour
from paceline.wire import Chunk, Final, SpecStats, Timings, Usage

ROOT = Path(cli.__file__).parent.parent
TEXT = "riders take turns"


def paceline_command(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_generate_prints_the_text_and_numbers_to_standard_error(capsys):
    with Server(script=lambda _: TEXT) as server:
        status = cli.main(["generate", "ride", "--address", server.address, "--seed", "5", "--stats"])
    out, err = capsys.readouterr()
    assert (status, out) == (0, TEXT + "\n")
    assert "seed 5\n" in err
    assert "tokens per step" in err


def test_generate_passes_its_options_on():
    with Server(script=lambda _: TEXT) as server:
        options = ["--max-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b"]
        cli.main(["generate", "ride", "--address", server.address, *options, "--ignore-eos"])
    (spec,) = server.engine.specs
    assert (spec.max_tokens, spec.sampling.temperature, spec.sampling.top_k) == (9, 0.5, 3)
    assert (spec.stop, spec.ignore_eos) == (("a", "b"), True)


def test_generate_reads_its_prompt_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    with Server(script=lambda _: TEXT) as server:
        cli.main(["generate", "-", "--address", server.address])
    assert server.engine.specs[0].prompt_ids == (256, 104, 105)


def test_a_refused_request_is_one_line_and_status_1(capsys):
    with Server() as server:
        status = cli.main(["generate", "ride", "--address", server.address, "--top-p", "7"])
    err = capsys.readouterr().err
    assert status == 1
    assert err.startswith("paceline: `top_p` must be from 0 to 1")
    assert err.count("\n") == 1


def test_ctrl_c_cancels_a_generation_and_exits_130():
    with Server(tokens_per_step=(4,)) as server:
        server.hold_after(1)
        process = paceline_command("generate", "ride", "--address", server.address)
        assert len(process.stdout.read(4)) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        server.wait_idle()
        assert "Traceback" not in process.stderr.read()


def test_a_reader_that_leaves_ends_the_command_quietly():
    with Server(max_model_len=200_000) as server:
        process = paceline_command("generate", "ride", "--address", server.address)
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == ""
        server.wait_idle()


def test_help_loads_no_socket_library():
    code = (
        "import sys\nfrom paceline import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'zmq', 'msgspec', 'asyncio'} & set(sys.modules)"
    )
    assert (
        "serve"
        in subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    )


def test_the_version_is_the_distributions(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"paceline {project['version']}\n"
    assert paceline.__version__ == project["version"]


@pytest.mark.parametrize(
    ("command", "module"), [("serve", "services.supervisor"), ("train-draft", "training")]
)
def test_a_command_that_runs_models_becomes_its_module_with_arguments_untouched(monkeypatch, command, module):
    called = []
    monkeypatch.setattr(os, "execve", lambda *arguments: called.append(arguments))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    cli.main([command, "--help", "--k", "4", "--", "x"])
    ((program, arguments, environment),) = called
    assert program == sys.executable
    assert arguments[1:] == ["-m", module, "--help", "--k", "4", "--", "x"]
    assert environment["PYTHONPATH"] == f"{ROOT}{os.pathsep}/elsewhere"


def chunk(text: str, spans: list[int]) -> Chunk:
    return Chunk(1, 0, [], text, [], spans, 0, 0)


def test_only_text_from_the_draft_is_coloured():
    assert painted(chunk("abcdef", [1, 3, 2])) == f"a{DRAFT_COLOUR}bcd{PLAIN}ef"
    assert painted(chunk("abc", [0, 3])) == f"{DRAFT_COLOUR}abc{PLAIN}"
    assert painted(chunk("", [])) == ""


def test_colour_is_for_terminals_that_want_it():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert wants_colour(Terminal(), {"TERM": "xterm"})
    assert not wants_colour(Terminal(), {"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {"TERM": "xterm"})


def test_the_summary_counts_from_the_end_of_the_queue():
    final = Final(
        1,
        0,
        "length",
        None,
        Usage(4, 30, 0),
        7,
        SpecStats(12, 40, 18, []),
        Timings(queue_s=1, first_token_s=1.5, total_s=3),
    )
    assert (
        summary(final)
        == "30 tokens · 15.0 tokens/s · 2.50 tokens per step · 18 of 40 drafted accepted · ended by length"
    )


def conversation_of(lines, server, out, system=None):
    """A whole conversation; an exception among the lines is raised instead of a line."""
    pending = iter(lines)

    def read(_: str) -> str:
        line = next(pending, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    with Client(server.address) as client:
        conversation = Conversation(client, Painter(out, colour=False), system, {"temperature": 0.0})
        converse(conversation, Painter(out, colour=False), read)
    return conversation


def test_a_conversation_remembers_until_it_is_reset():
    out = io.StringIO()
    with Server(script=lambda _: TEXT) as server:
        conversation = conversation_of(
            ["hi", "", "more", "/reset", "again", "/quit", "never"], server, out, "be brief"
        )
    prompts = [bytes(spec.prompt_ids).decode() for spec in server.engine.specs]
    assert prompts[0] == "<system>be brief\n<user>hi\n<assistant>"
    assert prompts[1] == f"<system>be brief\n<user>hi\n<assistant>{TEXT}\n<user>more\n<assistant>"
    assert prompts[2] == "<system>be brief\n<user>again\n<assistant>"
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    assert out.getvalue().count(TEXT) == 3
    assert "tokens per step" in out.getvalue()


def test_a_question_that_fails_is_forgotten():
    out = io.StringIO()
    with Server(script=lambda _: TEXT, max_model_len=60) as server:
        conversation = conversation_of(["x" * 100, "hi"], server, out)
    assert "/reset starts afresh" in out.getvalue()
    assert [message["content"] for message in conversation.messages] == ["hi", TEXT]


def test_ctrl_c_at_the_prompt_goes_on():
    out = io.StringIO()
    with Server(script=lambda _: TEXT) as server:
        conversation = conversation_of([KeyboardInterrupt(), "/what", "hi"], server, out)
    assert [message["content"] for message in conversation.messages] == ["hi", TEXT]
    assert out.getvalue().count("/quit") == 2


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said():
    class Interrupting(Painter):
        def chunk(self, chunk: Chunk) -> None:
            super().chunk(chunk)
            raise KeyboardInterrupt

    out = io.StringIO()
    with Server(tokens_per_step=(4,)) as server, Client(server.address) as client:
        server.hold_after(1)
        conversation = Conversation(client, Interrupting(out, colour=False), None, {})
        conversation.ask("hi")
        server.wait_idle()
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert len(conversation.messages[1]["content"]) == 4
    assert "stopped" in out.getvalue()


def test_chat_names_the_model_and_leaves_at_the_end_of_input(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda _: (_ for _ in ()).throw(EOFError))
    with Server() as server:
        assert cli.main(["chat", "--address", server.address]) == 0
    assert capsys.readouterr().out.startswith("tiny, drafter fake.")


def test_unknown_options_are_wrong_usage():
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "x", "--colour"])
    assert ended.value.code == 2
