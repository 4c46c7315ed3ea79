"""Processes under the supervisor: small Python modules that behave in one way each."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.supervisor import children
from services.supervisor.children import Child, ChildSpec, Escalation


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(children, "BACKOFF_FIRST_S", 0.01)

    def make(source: str) -> ChildSpec:
        (tmp_path / "behaviour.py").write_text(source)
        return ChildSpec("gateway", "behaviour", {"PYTHONPATH": str(tmp_path), "WHERE": str(tmp_path)})

    return make


async def until(path: Path) -> str:
    async with asyncio.timeout(20):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
    return path.read_text()


async def test_output_is_prefixed_with_the_childs_name(spec, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    child = Child(spec("print('one'); print('x' * 200_000); raise SystemExit(2)"))
    with pytest.raises(Escalation):
        await child.run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[gateway] one"
    assert all(line.startswith("[gateway] ") for line in lines)


async def test_a_child_that_ends_is_started_again(spec, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = """
import os, pathlib, time
runs = pathlib.Path(os.environ["WHERE"]) / "runs"
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if len(runs.read_text()) < 3:
    raise SystemExit(1)
(runs.parent / "settled").write_text("yes")
time.sleep(60)
"""
    child = Child(spec(source))
    running = asyncio.create_task(child.run())
    await until(tmp_path / "settled")
    await child.stop(5)
    await running
    assert (tmp_path / "runs").read_text() == "xxx"


async def test_a_child_that_cannot_start_as_configured_escalates_at_once(spec) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Escalation) as caught:
        await Child(spec("raise SystemExit(2)")).run()
    assert caught.value.code == 2


async def test_a_child_that_keeps_failing_escalates(spec, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(children, "FAILURES_LIMIT", 3)
    with pytest.raises(Escalation, match="ended 3 times"):
        await Child(spec("raise SystemExit(1)")).run()


async def test_a_child_that_ignores_sigterm_is_killed(spec, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(pathlib.Path(os.environ["WHERE"]) / "pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    child = Child(spec(source))
    running = asyncio.create_task(child.run())
    pid = int(await until(tmp_path / "pid"))
    await child.stop(0.05)
    await running
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_childs_standard_input_ends_with_its_parent(spec, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = """
import os, pathlib, sys
(pathlib.Path(os.environ["WHERE"]) / "pid").write_text(str(os.getpid()))
sys.stdin.buffer.read()
(pathlib.Path(os.environ["WHERE"]) / "orphaned").write_text("yes")
"""
    child = Child(spec(source))
    running = asyncio.create_task(child.run())
    await until(tmp_path / "pid")
    assert child._process is not None
    assert child._process.stdin is not None
    child._process.stdin.close()
    await until(tmp_path / "orphaned")
    await child.stop(5)
    await running
