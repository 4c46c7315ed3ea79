"""What the two device threads do with their work, on the toy model."""

import random
from dataclasses import dataclass, field

from toy_model import VOCAB, Cell, PagedMemory, Violation, chain_of, extend, next_token
from toy_rows import RowBuffer

from services.draft.work import DraftResult, DraftRow, DraftWork, Tree
from services.target.work import RoundResult, RoundWork, TreeResult, TreeRows, hidden_spans


@dataclass(frozen=True)
class Tenant:
    """Who has a slot: (request, generation), and how many leading positions were there at admission."""

    owner: tuple[int, int]
    cached: int


@dataclass
class TargetDevice:
    """Executes rounds on its own page memory. owners: by slot, told with the work."""

    memory: PagedMemory

    def execute(
        self, work: RoundWork, owners: dict[int, Tenant], elapsed_us: int, buffer: RowBuffer | None
    ) -> RoundResult:
        """buffer: hidden rows of the draft that the work captures for."""
        memory = self.memory
        rows: dict[int, list[Cell]] = {}
        for chunk in work.chunks:
            tenant = owners[chunk.slot]
            owner = tenant.owner
            chain = memory.read_prefix(chunk.pages, owner, chunk.start, "prefix of a chunk", tenant.cached)
            for offset, token in enumerate(chunk.ids):
                chain = extend(chain, token)
                position = chunk.start + offset
                cell = Cell(owner, position, token, chain)
                memory.write(chunk.pages, position, cell)
                rows.setdefault(chunk.slot, []).append(cell)
        trees = tuple(self._verify(tree, owners[tree.slot]) for tree in work.trees)
        if work.capture is None:
            return RoundResult(work.group, work.round, trees, elapsed_us)
        for tree, result in zip(work.trees, trees, strict=True):
            path = self._path(tree, owners[tree.slot], result)
            rows[tree.slot] = rows.get(tree.slot, []) + path
        spans = hidden_spans(work, trees)
        if buffer is None:
            raise Violation(f"round {work.round} captures for a draft that reads no hidden rows")
        buffer.write(work.capture.block, work.round, [cell for span in spans for cell in rows[span.slot]])
        return RoundResult(work.group, work.round, trees, elapsed_us, hidden=spans)

    def _path(self, tree: TreeRows, tenant: Tenant, result: TreeResult) -> list[Cell]:
        """Cells of the root and the accepted path."""
        root = tree.base - 1
        chain = self.memory.read_prefix(tree.pages, tenant.owner, root, "prefix of a path", tenant.cached)
        cells = []
        for offset, token in enumerate((tree.tokens[0], *result.ids[:-1])):
            chain = extend(chain, token)
            cells.append(Cell(tenant.owner, root + offset, token, chain))
        return cells

    def _verify(self, tree: TreeRows, tenant: Tenant) -> TreeResult:
        root, owner = tree.base - 1, tenant.owner
        prefix = self.memory.read_prefix(tree.pages, owner, root, "prefix of a tree", tenant.cached)
        chains: list[int] = []
        depths: list[int] = []
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if (node == 0) != (parent == -1) or parent >= node:
                raise Violation(f"node {node} of a tree has parent {parent}")
            if not 0 <= token < VOCAB:
                raise Violation(f"node {node} of a tree is id {token}, outside the vocabulary")
            chains.append(extend(prefix if node == 0 else chains[parent], token))
            depths.append(0 if node == 0 else depths[parent] + 1)
            cell = Cell(owner, root + depths[node], token, chains[node])
            self.memory.write(tree.pages, root + node, cell)
        ids, node = [], 0
        while True:
            token = next_token(chains[node], tree.sampling.seed)
            ids.append(token)
            children = [
                j for j, parent in enumerate(tree.parents) if parent == node and tree.tokens[j] == token
            ]
            if not children:
                return TreeResult(tree.slot, tuple(ids))
            node = children[0]
            position = root + depths[node]
            self.memory.write(tree.pages, position, Cell(owner, position, token, chains[node]))


@dataclass
class DraftDevice:
    """Drafts by the oracle, by noise or by nothing. reach: by tenancy, positions whose drafter KV is in
    place."""

    rng: random.Random
    memory: PagedMemory
    skill: float
    branching: bool
    reach: dict[tuple[int, int], int] = field(default_factory=dict)

    def execute(self, work: DraftWork, table: dict[int, tuple[int, ...]]) -> DraftResult:
        """table: the exported page table as it was when the work began."""
        trees = tuple(self._draft(row, table.get(row.slot, ())) for row in work.rows)
        return DraftResult(work.group, work.round, tuple(tree for tree in trees if len(tree.tokens) > 1))

    def touched(self, row: DraftRow, table: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        return table.get(row.slot, ())[: -(-row.allocated // self.memory.page_size)]

    def _draft(self, row: DraftRow, pages: tuple[int, ...]) -> Tree:
        known = min(self.reach.get(row.key, 0), row.invalid_from, len(row.ids))
        chain = self.memory.read_prefix(pages, row.key, known, "drafter state", shared=known)
        if chain != chain_of(row.ids[:known]):
            raise Violation(f"drafter state of {row.key} stems from other ids than {row.ids[:known]}")
        for position in range(known, len(row.ids)):
            chain = extend(chain, row.ids[position])
            self._write(row, pages, position, row.ids[position], chain)
        self.reach[row.key] = len(row.ids)
        tokens, parents, node = [row.ids[-1]], [-1], 0
        while len(tokens) <= row.k:
            right = next_token(chain, row.sampling.seed)
            guess = right if self.rng.random() < self.skill else self.rng.randrange(VOCAB)
            tokens.append(guess)
            parents.append(node)
            if self.branching and guess != right and len(tokens) <= row.k and self.rng.random() < 0.5:
                tokens.append(right)
                parents.append(node)
                guess = right
            node = len(tokens) - 1
            chain = extend(chain, guess)
            self._write(row, pages, len(row.ids) - 1 + node, guess, chain)
        return Tree(row.slot, tuple(tokens), tuple(parents))

    def _write(self, row: DraftRow, pages: tuple[int, ...], position: int, token: int, chain: int) -> None:
        if position >= row.allocated:
            raise Violation(f"the draft of {row.key} was led to position {position} of {row.allocated}")
        self.memory.write(pages, position, Cell(row.key, position, token, chain))
