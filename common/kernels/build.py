"""C++ sources become shared objects, compiled once and kept on disk between starts."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.model.catalog import cache_home

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-pthread", "-fPIC", "-shared")
TIMEOUT_S = 120.0


class KernelsUnavailable(Exception):
    """This machine cannot compile or load the kernels; the message says what to do about it."""


def compiled(source: Path, flags: tuple[str, ...]) -> Path:
    """The shared object made from source and the headers beside it with FLAGS and flags (instruction sets);
    compiled if it is missing.

    Its file is named after everything that goes into it, so that one cache serves several versions. Raises
    KernelsUnavailable.
    """

    compiler = _compiler()
    version = _run([compiler, "--version"]).splitlines()[0]
    texts = [source.read_text(), *(header.read_text() for header in sorted(source.parent.glob("*.h")))]
    recipe = "\0".join([*texts, version, *FLAGS, *flags])
    name = f"{source.stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:32]}.so"
    library = cache_directory() / name
    if library.exists():
        return library
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(library):
            if not library.exists():
                _compile([compiler, *FLAGS, *flags], source, library)
    except OSError as error:
        raise KernelsUnavailable(
            f"cannot keep {library}: {error}; set PACELINE_KERNEL_CACHE to a directory that is writable"
        ) from error
    return library


def load(library: Path) -> ctypes.CDLL:
    """Raises KernelsUnavailable."""

    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(
            f"cannot load {library}: {error}; remove it, or set PACELINE_KERNEL_CACHE to a directory whose"
            " files may be executed"
        ) from error


def cache_directory() -> Path:
    """Where compiled kernels lie: `$PACELINE_KERNEL_CACHE`, else `kernels` in the cache that also holds
    models."""

    if chosen := os.environ.get("PACELINE_KERNEL_CACHE"):
        return Path(chosen).absolute()
    return cache_home() / "kernels"


def _compiler() -> str:
    candidates = [chosen] if (chosen := os.environ.get("CXX")) else COMPILERS
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise KernelsUnavailable(
        f"no C++ compiler ({', '.join(candidates)}) on PATH; install one (Debian: apt install g++) or set CXX"
    )


@contextmanager
def _alone(library: Path) -> Iterator[None]:
    """Processes that start together need the same library: one compiles it, the others wait."""
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], source: Path, library: Path) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        _run([*command, "-o", name, str(source)])
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise KernelsUnavailable(
            f"{command[0]} failed with status {error.returncode}: {last}; set CXX to another C++ compiler"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]}: {error}; set CXX to another C++ compiler") from error
    return done.stdout
