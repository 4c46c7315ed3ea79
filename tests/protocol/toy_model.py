"""A model whose next token is a hash of its whole prefix, and memory that knows what was written where."""

from dataclasses import dataclass

VOCAB = 61
EOS = 0
MASK = (1 << 61) - 1


class Violation(AssertionError):
    """A rule of the protocol was broken."""


def extend(chain: int, token: int) -> int:
    """Hash of a prefix with one more id."""
    return (chain * 6364136223846793005 + (token + 1) * 1442695040888963407) & MASK


def chain_of(ids: list[int] | tuple[int, ...]) -> int:
    chain = 0
    for token in ids:
        chain = extend(chain, token)
    return chain


def next_token(chain: int, seed: int) -> int:
    mixed = ((chain ^ seed) * 2862933555777941757) & MASK
    return (mixed >> 33) % VOCAB


def expected_text(prompt: tuple[int, ...], seed: int, max_tokens: int, max_model_len: int) -> list[int]:
    """What the request must say, EOS included, whatever happens to the pair."""
    chain, text = chain_of(prompt), []
    while len(text) < max_tokens and len(prompt) + len(text) < max_model_len:
        token = next_token(chain, seed)
        text.append(token)
        if token == EOS:
            break
        chain = extend(chain, token)
    return text


@dataclass(frozen=True, slots=True)
class Cell:
    """KV of one token: whose, at which logical position, which id, after which prefix (hash, itself
    included)."""

    owner: tuple[int, int]
    position: int
    token: int
    chain: int


class PagedMemory:
    """Cells by physical position. Nothing is cleared when a page changes hands, as on a device."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cells: dict[int, Cell] = {}

    def at(self, pages: tuple[int, ...], position: int) -> int:
        """Physical position, or a Violation if the page table does not reach it."""
        index = position // self.page_size
        if index >= len(pages) or pages[index] == 0:
            raise Violation(f"position {position} lies past the allocated pages {pages}")
        return pages[index] * self.page_size + position % self.page_size

    def read_prefix(
        self, pages: tuple[int, ...], owner: tuple[int, int], length: int, what: str, shared: int
    ) -> int:
        """The chain of positions 0 … length − 1, each checked to hold KV that continues the one before: this
        owner's from position `shared` on, anyone's below."""
        chain, cells, size = 0, self.cells, self.page_size
        for position in range(length):
            cell = cells.get(pages[position // size] * size + position % size)
            if cell is None:
                raise Violation(f"{what} of {owner}: position {position} was never written")
            expected = extend(chain, cell.token)
            foreign = cell.owner != owner and position >= shared
            if foreign or cell.position != position or cell.chain != expected:
                raise Violation(
                    f"{what} of {owner}: position {position} holds {cell}, chain {expected} was due"
                )
            chain = expected
        return chain

    def write(self, pages: tuple[int, ...], physical: int, cell: Cell) -> None:
        self.cells[self.at(pages, physical)] = cell
