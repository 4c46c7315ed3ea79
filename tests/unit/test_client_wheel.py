"""The distribution: the client alone, with two dependencies."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because a build leaves its own files behind. Needs no network."""
    copy = tmp_path_factory.mktemp("checkout")
    for package in ("paceline", "common", "services"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True, text=True
    )
    return copy / "dist" / built.stdout.split()[-1]


def run_bare(wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with the wheel's code first and no checkout on the path."""
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); from paceline.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *arguments], cwd=wheel.parent, capture_output=True, text=True
    )


def test_the_wheel_holds_the_client_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"paceline", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    assert "paceline/py.typed" in names


def test_the_wheel_depends_on_msgspec_and_pyzmq_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        required = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
    hard = [line for line in required if "extra ==" not in line]
    assert sorted(line.split("==")[0] for line in hard) == ["msgspec", "pyzmq"]


def test_the_client_imports_nothing_of_the_services(wheel):
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\nimport paceline\n"
        "for name in paceline.__all__: getattr(paceline, name)\n"
        "import paceline.chat, paceline.generate, paceline.cli\n"
        "assert paceline.__file__.startswith(sys.path[0]), paceline.__file__\n"
        "assert not {'services', 'common', 'torch', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=wheel.parent, check=True)


@pytest.mark.parametrize("command", ["serve", "train-draft"])
def test_what_runs_models_says_in_the_bare_wheel_in_one_line_what_to_do(wheel, command):
    refused = run_bare(wheel, command, "--model", "x")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "make serve" in refused.stderr
    assert command in refused.stderr


def test_the_bare_wheel_answers_help(wheel):
    helped = run_bare(wheel, "--help")
    assert helped.returncode == 0
    assert "generate" in helped.stdout
