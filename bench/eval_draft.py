"""`paceline eval-draft`: committed tokens per step of any drafter, by category of a prompt file.

Target and drafter work in this one process, over the tensors that two processes would share. No time is
measured, so a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.bars import grouped_bars
from bench.peers import DEMO_MODEL
from bench.prompts import GROUPS, PROMPTS_PATH, load_prompts, spread
from common.graphs.padded import padded_rows
from common.kv.lengths import pages_for
from common.messages.lifecycle import Configure
from common.messages.rounds import HIDDEN_BLOCKS, hidden_block
from common.model.catalog import resolve_model
from common.model.llama import LlamaModel
from common.model.load import load_model
from common.model.tokenizer import load_tokenizer
from common.sampling.params import SamplingParams
from common.service import StartupError
from common.settings import Settings
from services.draft.drafters.base import Drafter, HiddenStates, SharedState
from services.draft.drafters.load import load_drafter
from services.draft.work import DraftRow, DraftWork, HiddenRows
from services.target.memory import HiddenBlock
from services.target.runner import TargetRunner
from services.target.work import Capture, PrefillChunk, RoundWork, TreeRows

PAGE_SIZE = 16
CHUNK_ROWS = 512
SLOT = 1
MAX_POSITIONS = 4096
GREEDY = SamplingParams()
ALL = "all"


@dataclass(slots=True)
class Tally:
    """committed: tokens of all steps. reached[i]: steps that accepted more than i draft tokens."""

    steps: int = 0
    committed: int = 0
    reached: list[int] = field(default_factory=list)

    def add(self, committed: int) -> None:
        self.steps += 1
        self.committed += committed
        for position in range(committed - 1):
            if position == len(self.reached):
                self.reached.append(0)
            self.reached[position] += 1

    @property
    def tokens_per_step(self) -> float:
        return self.committed / max(1, self.steps)

    def shares(self) -> str:
        return " ".join(f"{count / max(1, self.steps):.2f}" for count in self.reached[:8])


class Pair:
    """A target and a drafter with one slot, driven round by round."""

    def __init__(self, model: LlamaModel, drafter: Drafter, k: int) -> None:
        self._drafter = drafter
        self._k = k
        self._positions = model.max_positions
        pages = pages_for(self._positions, PAGE_SIZE)
        self._pages = tuple(range(1, pages + 1))
        self._runner = TargetRunner(model, drafter.vocab_size)
        self._runner.allocate(Configure(1, 1, pages + 1, PAGE_SIZE, SLOT + 1, self._positions, k + 1))
        states = max(1, drafter.hidden_row_bytes // torch.bfloat16.itemsize)
        self._rows = torch.zeros(HIDDEN_BLOCKS, padded_rows(CHUNK_ROWS), states, dtype=torch.bfloat16)
        self._tags = torch.zeros(HIDDEN_BLOCKS, dtype=torch.int64)
        table = torch.zeros(SLOT + 1, pages, dtype=torch.int32)
        table[SLOT] = torch.tensor(self._pages)
        kv = torch.zeros((pages + 1) * PAGE_SIZE * drafter.kv_bytes_per_position, dtype=torch.uint8)
        hidden = HiddenStates(self._rows, self._tags, model.embedding) if drafter.capture else None
        drafter.attach(SharedState(table, kv, hidden, pages + 1, PAGE_SIZE, self._positions, k + 1))
        self._round = 0
        self._request = 0
        self._handed = 0
        self._unread: tuple[HiddenRows, ...] = ()

    def run(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        ends: frozenset[int],
        target: SamplingParams,
        drafter: SamplingParams,
    ) -> list[int]:
        """Tokens committed by every step until max_tokens or one of ends. target, drafter: what each samples
        and ranks with."""
        ids = tuple(prompt)
        limit = min(len(ids) + max_tokens, self._positions - self._k - 1)
        self._prefill(ids)
        steps = []
        while len(ids) < limit:
            tokens, parents = self._draft(ids, self._k, drafter)
            tree = TreeRows(SLOT, self._pages, len(ids), tokens, parents, target)
            new = self._execute((), (tree,), len(ids) - 1)
            steps.append(len(new))
            ids += new
            if ends.intersection(new):
                break
        return steps

    def _prefill(self, ids: tuple[int, ...]) -> None:
        self._request += 1
        self._handed, self._unread = 0, ()
        for start in range(0, len(ids) - 1, CHUNK_ROWS):
            self._draft(ids, 0, GREEDY)
            chunk = ids[start : min(len(ids) - 1, start + CHUNK_ROWS)]
            self._execute((PrefillChunk(SLOT, self._pages, start, chunk),), (), start)

    def _draft(
        self, ids: tuple[int, ...], k: int, sampling: SamplingParams
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents of the tree, the root alone if there is none."""
        key = (self._request, 1)
        row = DraftRow(SLOT, key, ids, self._handed, self._positions, k, sampling, self._unread)
        self._handed, self._unread = len(ids), ()
        trees = self._drafter.draft(DraftWork(0, self._round + 1, (row,), ())).trees
        return (trees[0].tokens, trees[0].parents) if trees else (ids[-1:], (-1,))

    def _execute(
        self, chunks: tuple[PrefillChunk, ...], trees: tuple[TreeRows, ...], start: int
    ) -> tuple[int, ...]:
        """start: position of the round's first row."""
        self._round += 1
        at = hidden_block(0, self._round)
        capture = Capture(1, at, self._drafter.capture) if self._drafter.capture else None
        result = self._runner.execute(
            RoundWork(0, self._round, chunks, trees, capture),
            HiddenBlock(self._rows[at], self._tags[at : at + 1]) if capture else None,
        )
        self._unread = tuple(
            HiddenRows(at, self._round, span.first, span.count, start) for span in result.hidden
        )
        return result.trees[0].ids if trees else ()


def evaluate(arguments: argparse.Namespace, model: LlamaModel, path: Path, named: str) -> dict[str, Tally]:
    """By category, and of all prompts together. model: of the checkpoint at path. named: the drafter."""
    settings = Settings(
        model=arguments.model,
        drafter=named,
        tree_width=arguments.tree_width,
        max_model_len=MAX_POSITIONS,
    )
    tokenizer = load_tokenizer(path)
    if tokenizer.chat_template is None:
        raise StartupError(f"model {arguments.model!r} has no chat template; prompts are chat turns")
    pair = Pair(model, load_drafter(settings), arguments.k)
    prompts = load_prompts(arguments.prompts)
    chosen = spread(prompts, arguments.count or len(prompts))
    tallies = {group: Tally() for group in (*GROUPS, ALL)}
    for done, prompt in enumerate(chosen, start=1):
        text = tokenizer.chat_template.render([{"role": "user", "content": prompt.text}], True)
        sampling = SamplingParams(arguments.temperature, seed=prompt.question_id)
        steps = pair.run(
            tokenizer.encode(text, add_special=False),
            arguments.max_tokens,
            frozenset(tokenizer.eos_ids),
            sampling,
            GREEDY if arguments.uncoupled else sampling,
        )
        for committed in steps:
            tallies[prompt.group].add(committed)
            tallies[ALL].add(committed)
        print(f"\r{named}: {done} of {len(chosen)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tallies


def report(found: Mapping[str, Mapping[str, Tally]]) -> str:
    """found: drafter → category → tally. Two tables: tokens per step, and what the steps accepted."""
    names = list(found)
    lines = ["| tokens per step | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for group in (*GROUPS, ALL):
        cells = [f"{found[name][group].tokens_per_step:.2f}" for name in names]
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    lines += ["", "| drafter | steps | steps that accepted 1, 2, … draft tokens |", "|---|---|---|"]
    lines += [f"| {name} | {found[name][ALL].steps} | {found[name][ALL].shares()} |" for name in names]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="paceline eval-draft", description=__doc__)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--drafter", action="append", help="as of `paceline serve` (eagle3); may be repeated")
    parser.add_argument("--k", type=int, default=8, help="draft tokens of a step (default: %(default)s)")
    parser.add_argument("--tree-width", type=int, default=4, help="1 drafts chains (default: %(default)s)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS_PATH, help="JSONL in Spec-Bench's format")
    parser.add_argument("--count", type=int, default=0, help="prompts, taken from the categories in turn")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--uncoupled", action="store_true", help="the drafter ignores the target's noise")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw tokens per step by category")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        path = resolve_model(arguments.model).path
        model = load_model(path, dtype=torch.bfloat16, max_positions=MAX_POSITIONS)
        drafters = dict.fromkeys(arguments.drafter or ["eagle3"])
        found = {named: evaluate(arguments, model, path, named) for named in drafters}
        print(report(found))
        if arguments.svg:
            rates = {
                name: {group: tally.tokens_per_step for group, tally in tallies.items()}
                for name, tallies in found.items()
            }
            arguments.svg.write_text(grouped_bars("committed tokens per step", rates), encoding="utf-8")
    except (StartupError, ValueError, OSError) as error:
        print(f"paceline eval-draft: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
