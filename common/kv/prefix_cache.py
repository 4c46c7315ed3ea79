"""Which full pages hold the KV of which ids, so that a log that begins alike need not compute it again."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from common.kv.pool import PagePool

Chain = list[bytes]
"""Names of a log's leading pages. A page's name is the SHA-256 of the name before it and of its own ids, so
it stands for every id up to the page's end: two logs meet in a name only if they agree so far."""


def extend_chain(chain: Chain, ids: Sequence[int], pages: int, page_size: int) -> None:
    """Append the names of the pages of ids up to `pages` in all."""
    for page in range(len(chain), pages):
        own = array("q", ids[page * page_size : (page + 1) * page_size]).tobytes()
        chain.append(sha256((chain[-1] if chain else b"") + own).digest())


class PrefixCache:
    """Gives out the pages of a pool and keeps what was computed in them until the room is needed.

    The cache holds one reference to every page that it knows a name for. A page that nobody else holds is
    idle: it can be found, and it can be given out at once. Idle pages are ordered by last use, those of one
    chain from its end to its beginning, so that the page that goes first has no idle page behind it in any
    chain.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be given out: free ones and idle ones."""
        return self._pool.free + len(self._idle)

    @property
    def pages(self) -> frozenset[int]:
        """Pages that the cache holds."""
        return frozenset(self._name_of)

    @property
    def idle(self) -> tuple[int, ...]:
        """Idle pages, the one that goes first at the front."""
        return tuple(self._idle)

    def take(self, count: int) -> list[int] | None:
        """count pages with one reference each, or None and nothing changed if fewer are available.

        Forgets the longest unused idle pages, as many as the free ones fall short of count.
        """
        if count > self.available:
            return None
        for _ in range(count - self._pool.free):
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._name_of.pop(page)]
            self._pool.drop(page)
        return self._pool.take(count)

    def hold(self, ids: Sequence[int], most_pages: int) -> tuple[list[int], Chain]:
        """The leading pages of ids that are known, most_pages at most, with one more reference each; and
        their names."""
        pages: list[int] = []
        chain: Chain = []
        while len(pages) < most_pages:
            extend_chain(chain, ids, len(pages) + 1, self._pool.page_size)
            page = self._page_of.get(chain[-1])
            if page is None:
                chain.pop()
                break
            self._pool.share(page)
            self._idle.pop(page, None)
            pages.append(page)
        return pages, chain

    def enter(self, pages: Sequence[int], chain: Chain) -> None:
        """pages[i], which the caller holds, has its whole KV, the name chain[i], and is never written again.

        Where another page has the name already, that one stays.
        """
        for page, name in zip(pages, chain, strict=False):
            if name not in self._page_of:
                self._pool.share(page)
                self._page_of[name] = page
                self._name_of[page] = name

    def let_go(self, pages: Sequence[int], chain: Chain) -> None:
        """One reference less to each page. What the cache knows of the chain counts as used now."""
        for page in pages:
            self._pool.drop(page)
            if page in self._name_of and self._pool.references(page) == 1:
                self._idle[page] = None
        for name in reversed(chain):
            known = self._page_of.get(name)
            if known is not None and known in self._idle:
                self._idle.move_to_end(known)
