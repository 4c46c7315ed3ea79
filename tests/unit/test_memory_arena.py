import errno
import os
from pathlib import Path

import pytest
import torch

from common.memory.arena import Arena, ArenaError, TensorSpec, arena_bytes, manifest_of
from common.memory.attach import attach
from common.memory.handle import HandleError, PeerAccess, decode, encode
from common.memory.selftest import has_pattern, pattern, write_pattern

SPECS = {
    "page_table": TensorSpec(torch.int32, (3, 5)),
    "hidden": TensorSpec(torch.bfloat16, (2, 7)),
    "bytes": TensorSpec(torch.uint8, (1,)),
}


def make(directory: Path, label: str = "rows", access: PeerAccess = "read", **specs: TensorSpec) -> Arena:
    return Arena.create(
        service="target",
        incarnation=7,
        label=label,
        tensors=specs or SPECS,
        access=access,
        directory=directory,
    )


def test_an_arena_is_one_private_file_of_the_planned_size(tmp_path: Path) -> None:
    with make(tmp_path) as arena:
        assert arena.path == tmp_path / f"paceline-target-{os.getpid()}-0000000000000007-rows"
        status = arena.path.stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == arena.size_bytes == arena_bytes(SPECS) == 3 * 64
        assert status.st_blocks * 512 >= status.st_size  # reserved, not sparse
    assert list(tmp_path.iterdir()) == []


def test_tensors_are_zero_aligned_and_apart(tmp_path: Path) -> None:
    with make(tmp_path) as arena:
        for name, spec in SPECS.items():
            tensor = arena.tensors[name]
            assert (tensor.dtype, tensor.shape) == (spec.dtype, spec.shape)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()
        for number, tensor in enumerate(arena.tensors.values(), 1):
            tensor.fill_(number)
        for number, tensor in enumerate(arena.tensors.values(), 1):
            assert (tensor == number).all()


def test_what_one_side_writes_the_other_reads(tmp_path: Path) -> None:
    with make(tmp_path) as rows, make(tmp_path, "kv", "write", kv=TensorSpec(torch.uint8, (4096,))) as kv:
        attached = attach(decode(encode(manifest_of(7, rows, kv))), SPECS, directory=tmp_path)
        rows.tensors["page_table"][2, 4] = 99
        assert attached.tensors["page_table"][2, 4] == 99
        write_pattern(attached.tensors["kv"], 5)
        assert has_pattern(kv.tensors["kv"], 5)
        attached.detach()
        attached.detach()
        assert attached.tensors == {}


def test_closing_is_idempotent_and_leaves_tensors_in_hand_alone(tmp_path: Path) -> None:
    arena = make(tmp_path)
    table = arena.tensors["page_table"]
    arena.close()
    arena.close()
    table.fill_(3)
    assert int(table.sum()) == 45


def test_a_directory_that_is_too_small_fails_at_start_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError) as error:
        make(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "needs 192 bytes" in str(error.value)
    assert "are free" in str(error.value)
    assert "larger tmpfs, lower the KV memory, or set another" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_more_memory_than_the_file_system_has_is_really_refused() -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm is not writable here")
    with pytest.raises(ArenaError, match="/dev/shm is too small"):
        make(shm, huge=TensorSpec(torch.uint8, (1 << 50,)))
    assert not list(shm.glob(f"paceline-target-{os.getpid()}-*"))


def test_a_directory_that_is_missing_or_relative_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=r"missing cannot be written: No such file"):
        make(tmp_path / "missing")
    with pytest.raises(ArenaError, match="'shm' is not absolute"):
        make(Path("shm"))


def test_a_label_can_be_used_once(tmp_path: Path) -> None:
    with make(tmp_path), pytest.raises(ArenaError, match="exists already"):
        make(tmp_path)


@pytest.mark.parametrize("label", ["", "Rows", "a/b", "a-b"])
def test_a_label_that_is_no_part_of_a_file_name_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(ArenaError, match="does not have the form"):
        make(tmp_path, label)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (TensorSpec(torch.complex64, (1,)), "complex64 cannot be shared"),
        (TensorSpec(torch.uint8, ()), "holds nothing"),
        (TensorSpec(torch.uint8, (4, 0)), "holds nothing"),
    ],
)
def test_a_plan_that_cannot_be_shared_is_refused_by_name(
    tmp_path: Path, spec: TensorSpec, complaint: str
) -> None:
    with pytest.raises(ArenaError, match=f"tensor 'odd'.*{complaint}"):
        make(tmp_path, odd=spec)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_name_that_no_handle_may_have_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(HandleError, match="'Odd'"):
        make(tmp_path, Odd=TensorSpec(torch.uint8, (1,)))
    assert list(tmp_path.iterdir()) == []


def test_two_arenas_with_a_tensor_of_one_name_make_no_manifest(tmp_path: Path) -> None:
    with (
        make(tmp_path) as one,
        make(tmp_path, "again") as two,
        pytest.raises(HandleError, match="stands twice"),
    ):
        manifest_of(7, one, two)


def test_the_pattern_depends_on_every_bit_of_the_nonce_and_on_the_position() -> None:
    base = pattern(5, 4096)
    assert base.unique().numel() == 256
    assert not torch.equal(base[:2048], base[2048:])
    for bit in range(64):
        assert (pattern(5 ^ (1 << bit), 4096) != base).float().mean() > 0.9
    assert torch.equal(pattern(2**64, 64), pattern(0, 64))


def test_one_wrong_byte_spoils_the_pattern() -> None:
    view = torch.zeros(1000, dtype=torch.uint8)
    assert not has_pattern(view, 1)
    write_pattern(view, 1)
    assert has_pattern(view, 1)
    view[999] ^= 1
    assert not has_pattern(view, 1)
