"""The simulator finds each broken rule of the prefix cache that is put into the target or the gateway."""

from hashlib import sha256

import pytest
from protocol_simulator import caught

from common.kv import prefix_cache
from common.kv.lengths import pages_for
from common.kv.prefix_cache import PrefixCache
from services.gateway.requests import Requests
from services.target import slots as slots_module
from services.target.slots import Slot, Slots

ALIKE = {"sharing": 1.0}


def test_the_simulator_catches_pages_that_are_named_by_their_place_and_own_ids_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetful(chain: list[bytes], ids, pages: int, page_size: int) -> None:
        for page in range(len(chain), pages):
            own = ids[page * page_size : (page + 1) * page_size]
            chain.append(sha256(bytes([page, *own])).digest())

    monkeypatch.setattr(prefix_cache, "extend_chain", forgetful)
    monkeypatch.setattr(slots_module, "extend_chain", forgetful)
    assert "was due" in caught(page_size=1, pages=80, **ALIKE)


def test_the_simulator_catches_a_hit_that_takes_the_bonus_token_in(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.hold
    monkeypatch.setattr(PrefixCache, "hold", lambda self, ids, most: original(self, ids, most + 1))
    assert "bonus token" in caught(**ALIKE)


def test_the_simulator_catches_a_page_that_enters_before_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Slots, slot: Slot) -> None:
        full = pages_for(min(slot.kv, len(slot.ids) - 1), self.pool.page_size)
        slots_module.extend_chain(slot.chain, slot.ids, full, self.pool.page_size)
        self.cache.enter(slot.pages, slot.chain)

    monkeypatch.setattr(Slots, "settle", hasty)
    monkeypatch.setattr(Slots, "first_writable", lambda self, slot: slot.cached)
    assert "which is shared" in caught(**ALIKE)


def test_the_simulator_catches_a_page_that_enters_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(self: Slots, slot: Slot) -> None:
        full = (len(slot.ids) - 1) // self.pool.page_size
        slots_module.extend_chain(slot.chain, slot.ids, full, self.pool.page_size)
        self.cache.enter(slot.pages, slot.chain)

    monkeypatch.setattr(Slots, "settle", hasty)
    monkeypatch.setattr(Slots, "first_writable", lambda self, slot: slot.cached)
    caught(**ALIKE)


def test_the_simulator_catches_a_page_that_is_forgotten_while_a_slot_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = PrefixCache.hold

    def careless(self: PrefixCache, ids, most: int):
        found = original(self, ids, most)
        for page in found[0]:
            if self._pool.references(page) == 2:
                self._idle[page] = None
        return found

    monkeypatch.setattr(PrefixCache, "hold", careless)
    assert "count as idle" in caught(**ALIKE)


def test_the_simulator_catches_a_hit_that_takes_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.hold

    def greedy(self: PrefixCache, ids, most: int):
        pages, chain = original(self, ids, most)
        for page in pages:
            self._pool.drop(page)
        return pages, chain

    monkeypatch.setattr(PrefixCache, "hold", greedy)
    assert "references" in caught(**ALIKE)


def test_the_simulator_catches_a_page_that_never_becomes_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: PrefixCache, pages, chain) -> None:
        for page in pages:
            self._pool.drop(page)

    monkeypatch.setattr(PrefixCache, "let_go", keep)
    assert "count as idle" in caught(**ALIKE)


def test_the_simulator_catches_a_forgotten_page_whose_reference_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = PrefixCache.take

    def leak(self: PrefixCache, count: int) -> list[int] | None:
        before = self.pages
        taken = original(self, count)
        for page in (before - self.pages) & set(taken or ()):
            self._pool.share(page)
        return taken

    monkeypatch.setattr(PrefixCache, "take", leak)
    assert "references" in caught(**ALIKE)


def test_the_simulator_catches_a_prompt_that_is_computed_over_shared_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Requests.go_live

    def from_the_start(self: Requests, request, answer) -> None:
        original(self, request, answer)
        request.kv = 0

    monkeypatch.setattr(Requests, "go_live", from_the_start)
    monkeypatch.setattr(Slots, "first_writable", lambda self, slot: 0)
    assert "which is shared" in caught(**ALIKE)
