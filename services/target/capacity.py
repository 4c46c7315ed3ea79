"""How large the KV pool may be when nobody says: what is free, less a reserve, and no more than is of use."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.lengths import pages_for, useful_pages
from common.memory.free import FreeMemory
from common.settings import Settings

RESERVE_BYTES = 1 << 30
"""Left free beside the KV: activations, the draft's weights, the gateway, the system."""
SHARED_RESERVE_BYTES = 64 << 20
"""Left free in the shared-memory directory beside the drafter's KV: page table, hidden rows, patterns."""
DRAFTERS_WITHOUT_KV = ("none", "ngram")


class TooLittleMemory(Exception):
    """One line: what is free, what one request needs, the remedy."""


@dataclass(frozen=True, slots=True)
class KvRoom:
    """positions: of the pool. why: for the log, with what bounds it."""

    positions: int
    why: str


def kv_room(
    settings: Settings, kv_bytes: int, max_positions: int, free: FreeMemory, shared_bytes: int
) -> KvRoom:
    """The largest pool of whole pages that fits. Raises TooLittleMemory if not one request of
    min(max_model_len, max_positions) does.

    kv_bytes: of one position. shared_bytes: free in shm_dir. The drafter's KV, which is in memory as well as
    in shm_dir, is not known before a draft says Hello: it is taken to be as large as the target's.
    """
    size = settings.page_size
    context = min(settings.max_model_len, max_positions)
    drafter_bytes = 0 if settings.drafter in DRAFTERS_WITHOUT_KV else kv_bytes
    pages = {
        f"{_gib(free.bytes)} are free ({free.bound})": (free.bytes - RESERVE_BYTES)
        // ((kv_bytes + drafter_bytes) * size)
    }
    if drafter_bytes:
        told = f"{_gib(shared_bytes)} are free in {settings.shm_dir} for the drafter's part"
        pages[told] = (shared_bytes - SHARED_RESERVE_BYTES) // (drafter_bytes * size)
    bound, most = min(pages.items(), key=lambda item: item[1])
    needed = pages_for(context, size)
    if most < needed:
        raise TooLittleMemory(
            f"too little memory for KV: {bound}, {_gib(RESERVE_BYTES)} of the memory stay free, and one "
            f"request of {context} tokens needs {_gib(needed * size * (kv_bytes + drafter_bytes))}: "
            "free some, lower --max-model-len, or say --kv-memory"
        )
    useful = useful_pages(settings.max_num_seqs, context, size)
    if useful <= most:
        bound += f", {settings.max_num_seqs} requests of {context} tokens have no use for more"
    positions = min(most, useful) * size
    return KvRoom(positions, f"{positions} positions, {_gib(positions * kv_bytes)}: {bound}")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
