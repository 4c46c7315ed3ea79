"""Settings of a whole stack: one flat table, read the same way by every service.

Precedence: command-line flag, then PACELINE_* environment variable, then the TOML file named by --config,
then the default. A key that no setting has is refused by name wherever it stands.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

ENV_PREFIX = "PACELINE_"
ENV_RESERVED = frozenset({"PACELINE_HOME", "PACELINE_KERNEL_CACHE", "PACELINE_CONFIG", "PACELINE_SUPERVISED"})
AUTO = "auto"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_SIZE_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class SettingsError(Exception):
    """One line that names the key, the value and what is allowed."""


def default_run_dir() -> str:
    return str(Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Field names are the keys: `--kv-memory`, PACELINE_KV_MEMORY and `kv_memory = …` set kv_memory."""

    model: str = "smollm2-135m-instruct"
    weights: Literal["bf16", "int4", "auto"] = "auto"
    drafter: str = AUTO
    host: str = "127.0.0.1"
    port: int = 8000
    zmq_host: str = "127.0.0.1"
    zmq_port: int = 8001
    api_key: str = ""
    max_model_len: int = 4096
    max_num_seqs: int = 8
    kv_memory: str = "auto"
    page_size: int = 16
    prefill_chunk: int = 256
    k: int | Literal["auto"] = "auto"
    groups: int | Literal["auto"] = "auto"
    tree_width: int = 4
    draft_wait_s: float = 0.25
    queue_limit: int = 256
    target_threads: int = 0
    draft_threads: int = 0
    run_dir: str = msgspec.field(default_factory=default_run_dir)
    shm_dir: str = "/dev/shm"
    log_level: str = "info"
    check_page_table: bool = False

    @property
    def kv_memory_bytes(self) -> int | None:
        """None: the target chooses by what is free."""
        return None if self.kv_memory == AUTO else parse_size("kv_memory", self.kv_memory)


HELP = {
    "model": "name of a known model, a Hugging Face directory, or a .gguf file",
    "weights": "bf16, int4 (a GGUF file's own blocks), or auto: int4 where the model has them",
    "drafter": "none, ngram, eagle3 (the head that ships for the model), eagle3+ngram (lookup hits first), "
    "the path of an EAGLE-3 head or a draft model, or auto: eagle3+ngram where a head ships, else ngram",
    "host": "address of the HTTP front; beyond loopback it needs an API key",
    "port": "port of the HTTP front",
    "zmq_host": "address of the ZeroMQ front (loopback only)",
    "zmq_port": "port of the ZeroMQ front",
    "api_key": "key that HTTP requests must carry",
    "max_model_len": "longest prompt plus answer, in tokens",
    "max_num_seqs": "requests that run at once",
    "kv_memory": "memory for the target's KV pages, for example 512MiB; auto chooses by what is free",
    "page_size": "KV positions of a page: a power of two up to 64",
    "prefill_chunk": "prompt tokens computed in one round beside the decoding requests",
    "k": "draft tokens asked for in every round; auto chooses by what was measured, none included",
    "groups": "1 or 2 sets of requests that step by turns, so that the draft works on one while the target "
    "works on the other; auto takes 2 from 4 cores on",
    "tree_width": "nodes that each level of an EAGLE-3 head's tree expands; 1 drafts chains",
    "draft_wait_s": "seconds that a round waits for the draft before it goes on without",
    "queue_limit": "requests that may wait or run before new ones are turned away",
    "target_threads": "threads of the target's device work; 0 takes the cores there are",
    "draft_threads": "threads of the draft's device work; 0 takes the cores there are, half with two groups",
    "run_dir": "directory of the sockets between the services, private to the user",
    "shm_dir": "shared-memory directory for KV pages, page tables and hidden rows",
    "log_level": "debug, info, warning or error",
    "check_page_table": "true: the draft compares the shared page table with the messages every round",
}

_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "zmq_port": (0, 65535),
    "max_model_len": (2, 1 << 20),
    "max_num_seqs": (1, 1024),
    "page_size": (1, 64),
    "prefill_chunk": (1, 1 << 16),
    "k": (0, 32),
    "groups": (1, 2),
    "tree_width": (1, 16),
    "draft_wait_s": (0.0, 60.0),
    "queue_limit": (1, 1 << 20),
    "target_threads": (0, 1024),
    "draft_threads": (0, 1024),
}


def parse_size(key: str, text: str) -> int:
    """Bytes of '512MiB', '4G', '1073741824'. K, M, G, T are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{key}={text!r} is not a size: write for example 512MiB or 4GiB")
    return int(float(match[1]) * 1024 ** _SIZE_POWER[match[2].upper()])


def load_settings(prog: str, argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Merge the sources. Raises SettingsError; argparse exits by itself on `--help` and unknown flags."""
    flags = _parse_flags(prog, argv)
    config = flags.pop("config", None) or environ.get("PACELINE_CONFIG")
    values: dict[str, Any] = {}
    if config:
        values |= _read_toml(Path(config))
    values |= _read_environ(environ)
    values |= flags
    return _checked(values)


def check_shm_dir(settings: Settings) -> None:
    """For the processes that use it. Raises SettingsError."""
    path = Path(settings.shm_dir)
    if not path.is_absolute() or not path.is_dir():
        raise SettingsError(
            f"shm_dir={settings.shm_dir!r} must be the absolute path of a directory that exists"
        )


def to_environ(settings: Settings) -> dict[str, str]:
    """The same settings as environment variables, for a child process."""
    values = msgspec.to_builtins(settings)
    return {
        ENV_PREFIX + key.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
    }


def _types() -> dict[str, type]:
    return get_type_hints(Settings)


def _parse_flags(prog: str, argv: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    defaults = msgspec.to_builtins(Settings())
    for key in _types():
        parser.add_argument(
            "--" + key.replace("_", "-"),
            dest=key,
            metavar=key.upper(),
            default=argparse.SUPPRESS,
            help=f"{HELP[key]} (default: {defaults[key] if defaults[key] != '' else 'none'})",
        )
    return vars(parser.parse_args(argv))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: not TOML: {error}") from None
    for key in values:
        if key not in _types():
            raise SettingsError(f"--config {path}: no setting is called {key!r}")
    return values


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in ENV_RESERVED:
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        if key not in _types():
            raise SettingsError(f"environment: no setting is called {name}; unset it")
        values[key] = value
    return values


def _checked(values: Mapping[str, Any]) -> Settings:
    for key, value in values.items():
        try:
            msgspec.convert(value, _types()[key], strict=False)
        except msgspec.ValidationError:
            raise SettingsError(f"{key}={value!r} is not of the kind {_types()[key].__name__}") from None
    settings = msgspec.convert(values, Settings, strict=False)
    for key, (low, high) in _BOUNDS.items():
        value = getattr(settings, key)
        if value != AUTO and not low <= value <= high:
            raise SettingsError(f"{key}={value} is out of range: {low} to {high}")
    if settings.page_size & (settings.page_size - 1):
        raise SettingsError(f"page_size={settings.page_size} is not a power of two")
    if not settings.model or not settings.drafter:
        raise SettingsError("model and drafter must not be empty")
    if settings.port and settings.port == settings.zmq_port:
        raise SettingsError(f"port and zmq_port are both {settings.port}: give them a port each")
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise SettingsError(f"log_level={settings.log_level!r}: debug, info, warning or error")
    if settings.kv_memory_bytes is not None and settings.kv_memory_bytes < 1 << 20:
        raise SettingsError(f"kv_memory={settings.kv_memory} is too small: at least 1MiB")
    return settings
