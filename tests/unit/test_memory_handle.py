import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.memory.handle import (
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    CudaIpcStorage,
    HandleError,
    ManifestEntry,
    MemoryManifest,
    ShmStorage,
    TensorHandle,
    decode,
    encode,
    row_major_strides,
)

STORAGE = ShmStorage("/dev/shm/paceline-target-1-0000000000000007-kv", 4096)
GPU = CudaIpcStorage("GPU-1", bytes(64), 4096, 1024)


def handle(**changes: object) -> TensorHandle:
    fields: dict[str, object] = {
        "name": "rows",
        "dtype": "bfloat16",
        "shape": (4, 8),
        "strides": (8, 1),
        "offset": 64,
        "storage": STORAGE,
    }
    return TensorHandle(**(fields | changes))  # type: ignore[arg-type]


def manifest(*tensors: TensorHandle) -> MemoryManifest:
    return MemoryManifest(MANIFEST_VERSION, 7, tuple(ManifestEntry(tensor, "read") for tensor in tensors))


def test_a_manifest_survives_the_wire() -> None:
    sent = manifest(handle(), handle(name="on_gpu", storage=GPU))
    assert decode(encode(sent)) == sent


def test_strides_are_row_major() -> None:
    for shape in ((3,), (2, 3), (2, 1, 5)):
        assert row_major_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "Rows"}, "tensor name 'Rows' does not match"),
        ({"name": "../etc"}, "does not match"),
        ({"dtype": "float99"}, "'rows': dtype 'float99' is not one of"),
        ({"dtype": "bool"}, "dtype 'bool'"),
        ({"shape": (), "strides": ()}, "0 dimensions"),
        ({"shape": (1,) * 9, "strides": (1,) * 9}, "9 dimensions"),
        ({"shape": (4, 0)}, "dimension below 1"),
        ({"shape": (4, -8), "strides": (-8, 1)}, "dimension below 1"),
        ({"strides": (8, 2)}, "are not the row-major ones"),
        ({"strides": (0, 0)}, "are not the row-major ones"),
        ({"strides": (8,)}, "2 dimensions and 1 strides"),
        ({"offset": 32}, "offset 32 is not a multiple of 64"),
        ({"offset": -64}, "offset -64"),
        ({"offset": 4096 - 64 + 64}, "'rows': ends at byte 4160 of a storage of 4096 bytes"),
        ({"shape": (2**40, 2**40), "strides": (2**40, 1)}, "of a storage of 4096 bytes"),
        ({"storage": ShmStorage(STORAGE.path, -1)}, "of a storage of -1 bytes"),
        ({"storage": CudaIpcStorage("GPU-1", bytes(63), 4096, 0)}, "has 64 bytes, not 63"),
        ({"storage": CudaIpcStorage("GPU-1", bytes(64), 4096, 8192)}, "offset 8192 in an allocation of 4096"),
        ({"storage": CudaIpcStorage("GPU-1", bytes(64), 4096, 4032)}, "ends at byte 128 of a storage of 64"),
    ],
)
def test_a_handle_that_lies_is_refused_by_name(changes: dict[str, object], complaint: str) -> None:
    data = msgspec.msgpack.encode(manifest(handle(**changes)))
    with pytest.raises(HandleError, match=complaint):
        decode(data)


def test_the_last_byte_of_a_storage_may_be_used() -> None:
    assert decode(encode(manifest(handle(offset=4096 - 64))))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (MemoryManifest(2, 7, ()), "version 2, this process reads 1"),
        (MemoryManifest(1, 0, ()), "incarnation 0 is outside"),
        (manifest(handle(), handle(offset=1024)), "'rows' stands twice"),
        (manifest(handle(), handle(name="other")), "overlap: byte 64 is below 128"),
        (
            manifest(handle(), handle(name="other", offset=1024, storage=ShmStorage(STORAGE.path, 8192))),
            "'rows' and 'other' describe one storage differently",
        ),
        (
            MemoryManifest(
                1,
                7,
                (ManifestEntry(handle(), "read"), ManifestEntry(handle(name="kv", offset=1024), "write")),
            ),
            "'rows' and 'kv' share a storage but not their access",
        ),
        (manifest(*(handle(name=f"t{n}", offset=0) for n in range(1025))), "1025 entries, the limit is 1024"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changed: MemoryManifest, complaint: str) -> None:
    with pytest.raises(HandleError, match=complaint):
        decode(msgspec.msgpack.encode(changed))
    with pytest.raises(HandleError, match=complaint):
        encode(changed)


@given(st.binary(max_size=64))
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(HandleError):
        decode(data)


@given(st.data())
def test_a_manifest_with_a_changed_byte_is_refused_or_still_consistent(data: st.DataObject) -> None:
    wire = bytearray(encode(manifest(handle(), handle(name="on_gpu", storage=GPU))))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(wire))
    except HandleError:
        return
    assert decode(encode(decoded)) == decoded


def test_a_manifest_that_is_too_large_is_not_even_decoded() -> None:
    with pytest.raises(HandleError, match=f"the limit is {MAX_MANIFEST_BYTES}"):
        decode(bytes(MAX_MANIFEST_BYTES + 1))
