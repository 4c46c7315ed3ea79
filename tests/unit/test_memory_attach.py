import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from common.memory.arena import Arena, TensorSpec, manifest_of
from common.memory.attach import attach
from common.memory.handle import (
    CudaIpcStorage,
    HandleError,
    ManifestEntry,
    MemoryManifest,
    PeerAccess,
    ShmStorage,
    encode,
)

SPECS = {"rows": TensorSpec(torch.int32, (16, 64))}


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with make(tmp_path, "read") as arena:
        yield arena


def make(directory: Path, access: PeerAccess) -> Arena:
    return Arena.create(
        service="target", incarnation=7, label="rows", tensors=SPECS, access=access, directory=directory
    )


def with_storage(manifest: MemoryManifest, storage: ShmStorage | CudaIpcStorage) -> MemoryManifest:
    tensor = msgspec.structs.replace(manifest.entries[0].tensor, storage=storage)
    return msgspec.structs.replace(manifest, entries=(ManifestEntry(tensor, manifest.entries[0].access),))


def expect_refusal(arena: Arena, path: Path, size: int, complaint: str) -> None:
    lie = with_storage(manifest_of(7, arena), ShmStorage(str(path), size))
    with pytest.raises(HandleError, match=f"tensor 'rows': .*{complaint}"):
        attach(lie, directory=arena.path.parent)


def test_a_size_that_is_not_that_of_the_segment_is_refused(arena: Arena) -> None:
    expect_refusal(arena, arena.path, 8192, "has 4096 bytes, its handle says 8192")


def test_a_segment_that_was_cut_short_is_refused(arena: Arena) -> None:
    os.truncate(arena.path, 64)
    expect_refusal(arena, arena.path, 4096, "has 64 bytes, its handle says 4096")


@pytest.mark.parametrize(
    "place",
    [
        lambda path: path.parent / "other",
        lambda path: path.parent / "sub" / path.name,
        lambda path: path.parent / ".." / path.parent.name / path.name,
        lambda path: Path("/etc/passwd"),
        lambda path: Path(path.name),
    ],
)
def test_only_segments_in_the_directory_itself_are_opened(
    arena: Arena, place: Callable[[Path], Path]
) -> None:
    expect_refusal(arena, place(arena.path), 4096, "is no segment in")


def test_a_segment_of_another_incarnation_is_refused(arena: Arena) -> None:
    manifest = msgspec.structs.replace(manifest_of(7, arena), incarnation=8)
    with pytest.raises(HandleError, match="belongs to incarnation 0000000000000007"):
        attach(manifest, directory=arena.path.parent)


def sibling(arena: Arena, label: str) -> Path:
    return arena.path.parent / arena.path.name.replace("rows", label)


def test_a_symbolic_link_is_not_followed(arena: Arena) -> None:
    link = sibling(arena, "link")
    link.symlink_to(arena.path)
    expect_refusal(arena, link, 4096, "cannot be opened")


def test_what_is_not_a_regular_file_is_refused(arena: Arena) -> None:
    os.mkfifo(sibling(arena, "fifo"), 0o600)
    expect_refusal(arena, sibling(arena, "fifo"), 4096, "is not a regular file")
    sibling(arena, "directory").mkdir()
    expect_refusal(arena, sibling(arena, "directory"), 4096, "is not a regular file")


def test_a_segment_that_is_gone_is_refused(arena: Arena) -> None:
    expect_refusal(arena, sibling(arena, "gone"), 4096, "cannot be opened: No such file")


def test_a_segment_that_others_may_open_is_refused(arena: Arena) -> None:
    arena.path.chmod(0o640)
    expect_refusal(arena, arena.path, 4096, "has mode 0640, not 0600")


def test_a_segment_of_another_user_is_refused(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    expect_refusal(arena, arena.path, 4096, f"belongs to uid {uid}")


def test_a_segment_without_a_living_owner_is_refused(arena: Arena) -> None:
    orphan = sibling(arena, "orphan")
    orphan.write_bytes(bytes(4096))
    orphan.chmod(0o600)
    expect_refusal(arena, orphan, 4096, "the owner of segment .* is gone")


def test_memory_on_a_gpu_is_refused_with_the_reason(arena: Arena) -> None:
    lie = with_storage(manifest_of(7, arena), CudaIpcStorage("GPU-42", bytes(64), 4096, 0))
    with pytest.raises(
        HandleError, match=r"'rows' lies on GPU 'GPU-42'; this process maps shared memory only"
    ):
        attach(lie, directory=arena.path.parent)


@pytest.mark.parametrize(
    ("expected", "complaint"),
    [
        ({"hidden": SPECS["rows"]}, "'hidden' is expected and not in the manifest"),
        ({"rows": TensorSpec(torch.int64, (16, 64))}, "'rows' is int32 .* expected torch.int64"),
        ({"rows": TensorSpec(torch.int32, (64, 16))}, r"'rows' is int32 \(16, 64\), expected .* \(64, 16\)"),
    ],
)
def test_what_is_not_as_expected_is_refused(
    arena: Arena, expected: dict[str, TensorSpec], complaint: str
) -> None:
    with pytest.raises(HandleError, match=complaint):
        attach(manifest_of(7, arena), expected, directory=arena.path.parent)


def test_a_refused_manifest_leaves_nothing_mapped(arena: Arena) -> None:
    good = manifest_of(7, arena)
    gone = ShmStorage(str(sibling(arena, "gone")), 4096)
    bad = msgspec.structs.replace(with_storage(good, gone).entries[0].tensor, name="gone")
    before = mappings(arena)
    with pytest.raises(HandleError):
        attach(
            msgspec.structs.replace(good, entries=(*good.entries, ManifestEntry(bad, "read"))),
            directory=arena.path.parent,
        )
    assert mappings(arena) == before


def test_detaching_unmaps_with_the_last_tensor(arena: Arena) -> None:
    before = mappings(arena)
    attached = attach(manifest_of(7, arena), directory=arena.path.parent)
    rows = attached.tensors["rows"]
    attached.detach()
    assert len(mappings(arena)) == len(before) + 1
    assert not rows.any()
    del rows
    assert mappings(arena) == before


def mappings(arena: Arena) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(arena.path) in line]


PEER = """
import sys
from pathlib import Path
from common.memory.attach import attach
from common.memory.handle import decode
tensors = attach(decode(bytes.fromhex(sys.argv[1])), directory=Path(sys.argv[2])).tensors
assert tensors["rows"][3, 4] == 99
print("read", flush=True)
tensors["rows"][3, 5] = 100
print("written", flush=True)
"""


@pytest.mark.parametrize(
    ("access", "output", "code", "value"),
    [("read", "read\n", -signal.SIGSEGV, 0), ("write", "read\nwritten\n", 0, 100)],
)
def test_another_process_can_write_only_what_it_was_given(
    tmp_path: Path, access: PeerAccess, output: str, code: int, value: int
) -> None:
    with make(tmp_path, access) as arena:
        arena.tensors["rows"][3, 4] = 99
        peer = subprocess.run(
            [sys.executable, "-c", PEER, encode(manifest_of(7, arena)).hex(), str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        assert (peer.stdout, peer.returncode) == (output, code), peer.stderr
        assert arena.tensors["rows"][3, 5] == value
