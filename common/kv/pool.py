"""Which KV pages are given out, and to how many holders."""


class PagePool:
    """Page ids 1 … pages − 1 with reference counts; page 0 is never given out, padding rows point there.

    A page returns to the pool when its last reference is dropped. Dropping more than was taken is an error of
    the caller and raises RuntimeError.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 position or more, got {pages} pages of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._references = [0] * pages
        self._free = list(range(pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """count pages with one reference each, or None and nothing taken if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, page: int) -> None:
        """One more reference to a page that is given out."""
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._references[page] += 1

    def drop(self, page: int) -> None:
        """One reference less."""
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} has no reference left to drop")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
