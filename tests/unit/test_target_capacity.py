"""The size of the KV pool when nobody says it."""

from __future__ import annotations

import msgspec
import pytest

from common.memory.free import FreeMemory
from common.settings import Settings
from services.target.capacity import (
    RESERVE_BYTES,
    SHARED_RESERVE_BYTES,
    KvRoom,
    TooLittleMemory,
    kv_room,
)

SETTINGS = Settings(drafter="ngram", max_model_len=100, max_num_seqs=4, page_size=16)
USEFUL = 2 * 4 * 7 * 16
KV_BYTES = 1000


def room(free_bytes: int, shared_bytes: int = 0, **settings: object) -> KvRoom:
    """free_bytes, shared_bytes: beside the reserves."""
    return kv_room(
        msgspec.structs.replace(SETTINGS, **settings),
        KV_BYTES,
        8192,
        FreeMemory(RESERVE_BYTES + free_bytes, "the machine"),
        SHARED_RESERVE_BYTES + shared_bytes,
    )


def test_the_pool_is_no_larger_than_its_requests_have_use_for() -> None:
    found = room(1 << 40)
    assert found.positions == USEFUL
    assert "4 requests of 100 tokens have no use for more" in found.why


def test_the_pool_takes_what_is_free_but_for_the_reserve_in_whole_pages() -> None:
    found = room(200 * KV_BYTES + 999)
    assert found.positions == 192
    assert found.why == "192 positions, 0.00 GiB: 1.00 GiB are free (the machine)"


@pytest.mark.parametrize("drafter", ["/models/draft", "eagle3", "eagle3+ngram"])
def test_a_drafter_with_kv_takes_half_of_the_memory(drafter: str) -> None:
    assert room(400 * KV_BYTES, 1 << 40, drafter=drafter).positions == 192


def test_a_drafter_with_kv_fits_into_the_shared_memory_directory() -> None:
    found = room(1 << 40, 200 * KV_BYTES, drafter="/models/draft")
    assert found.positions == 192
    assert "/dev/shm" in found.why


def test_a_drafter_without_kv_needs_no_shared_memory() -> None:
    assert room(1 << 40, -SHARED_RESERVE_BYTES, drafter="none").positions == USEFUL


def test_the_models_own_context_bounds_what_a_request_can_use() -> None:
    found = kv_room(SETTINGS, KV_BYTES, 32, FreeMemory(1 << 40, "the machine"), 0)
    assert found.positions == 2 * 4 * 2 * 16


def test_room_for_one_request_is_enough() -> None:
    assert room(112 * KV_BYTES).positions == 112


@pytest.mark.parametrize("free_bytes", [112 * KV_BYTES - 1, 0, -RESERVE_BYTES])
def test_less_than_room_for_one_request_is_refused_with_a_remedy(free_bytes: int) -> None:
    with pytest.raises(TooLittleMemory, match=r"one request of 100 tokens needs .*--max-model-len"):
        room(free_bytes)


def test_too_small_a_shared_memory_directory_is_named() -> None:
    with pytest.raises(TooLittleMemory, match="/dev/shm for the drafter's part"):
        room(1 << 40, 111 * KV_BYTES, drafter="/models/draft")
