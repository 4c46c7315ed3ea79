"""The same token ids with any drafter or none, alone or batched, in one group or two, in any chunks, from any
point of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline import AsyncClient
from tests.e2e.stack import Stack, running
from tests.engine.eagle_head import write_random_head
from tests.prompts import prompts

MAX_TOKENS = 20
REPLAY_AT = 9
AT_ONCE = 8

HEAD = "a random head"
PROMPTS_OF = {"eagle_chain": 3, "eagle_tree": 6}
"""Stacks that run some of the prompts only."""
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
STACKS: dict[str, tuple[str, ...]] = {
    "none": ("--drafter", "none"),
    "ngram": ("--drafter", "ngram", "--k", "4", "--prefill-chunk", "24", "--check-page-table", "true"),
    "draft_model": (
        "--drafter",
        "smollm2-135m-instruct",
        "--k",
        "3",
        "--draft-wait-s",
        "10",
        "--check-page-table",
        "true",
    ),
    "two_groups": (
        "--groups",
        "2",
        "--drafter",
        "smollm2-135m-instruct",
        "--k",
        "2",
        "--draft-wait-s",
        "10",
        "--check-page-table",
        "true",
    ),
    # A random head: it drafts from the target's states, and is all but never right.
    "eagle_chain": ("--drafter", HEAD, "--k", "3", "--tree-width", "1", "--draft-wait-s", "10"),
    "eagle_tree": ("--drafter", HEAD, "--k", "7", "--draft-wait-s", "10", "--prefill-chunk", "24"),
}

WAYS = ("batch", "alone", "replayed")
CASES = [(stack, way) for stack in STACKS for way in WAYS if (stack, way) != ("two_groups", "alone")]
"""A request that is alone has one group."""

PROMPTS = [
    *prompts(per_group=2, groups={"mt_bench", "translation", "qa", "math_reasoning"}),
    *prompts(per_group=4, groups={"mt_bench"})[2:],
    *prompts(per_group=1, groups={"summarization"}),
    *prompts(per_group=3, groups={"translation"})[2:],
]

Ids = tuple[int, ...]


@dataclass
class Texts:
    """Token ids by (way of running, sampling, prompt). steps, drafted: over all. rejected: draft tokens
    that were not accepted, without those that the end of a request cut off."""

    ids: dict[tuple[str, str, int], Ids]
    log: str
    steps: int = 0
    drafted: int = 0
    rejected: int = 0


def prompt_ids(stack: Stack) -> list[list[int]]:
    rows = []
    for text in PROMPTS:
        status, body = stack.request("/tokenize", {"messages": [{"role": "user", "content": text}]})
        assert status == 200, body
        rows.append(body["tokens"])
    return rows


async def collect(stack: Stack, count: int, ways: Sequence[str]) -> Texts:
    texts = Texts({}, "")
    rows = prompt_ids(stack)[:count]
    gate = asyncio.Semaphore(AT_ONCE)

    async with AsyncClient(stack.address) as client:

        async def run(way: str, name: str, number: int, ids: list[int], max_tokens: int) -> Ids:
            async with gate:
                seed = 1000 + number
                stream = client.generate(
                    token_ids=ids, max_tokens=max_tokens, seed=seed, ignore_eos=True, **SAMPLING[name]
                )
                chunks = [chunk async for chunk in stream]
            texts.steps += stream.final.spec.steps
            texts.drafted += stream.final.spec.drafted
            texts.rejected += sum(chunk.drafted - chunk.accepted for chunk in chunks[:-1])
            done = tuple(token for chunk in chunks for token in chunk.token_ids)
            texts.ids[way, name, number] = done
            return done

        for name in SAMPLING:
            await asyncio.gather(
                *(run("batch", name, number, ids, MAX_TOKENS) for number, ids in enumerate(rows))
            )
            for number, ids in enumerate(rows if "alone" in ways else ()):
                await run("alone", name, number, ids, MAX_TOKENS)
            await asyncio.gather(
                *(
                    run(
                        "replayed",
                        name,
                        number,
                        ids + list(texts.ids["batch", name, number][:REPLAY_AT]),
                        MAX_TOKENS - REPLAY_AT,
                    )
                    for number, ids in enumerate(rows)
                )
            )
    stack.wait_pool_full()
    texts.log = stack.log
    return texts


class Collected(dict[str, Texts]):
    """Texts by stack, each run when it is first asked for. head: folder of the random head."""

    def __init__(self, head: Path) -> None:
        super().__init__()
        self._head = str(head)

    def __missing__(self, name: str) -> Texts:
        flags = (self._head if flag == HEAD else flag for flag in STACKS[name])
        with running(*flags, draft=name != "none") as stack:
            ways = [way for stack_name, way in CASES if stack_name == name]
            self[name] = asyncio.run(collect(stack, PROMPTS_OF.get(name, len(PROMPTS)), ways))
        return self[name]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return Collected(write_random_head(tmp_path_factory.mktemp("head")))


@pytest.fixture(scope="module")
def plain(texts: dict[str, Texts]) -> dict[tuple[str, int], Ids]:
    """What the model says alone and without a drafter."""
    return {(name, number): ids for (way, name, number), ids in texts["none"].ids.items() if way == "alone"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stack", "way"), CASES)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_token_ids_are_those_of_plain_decoding(
    texts: dict[str, Texts], plain: dict[tuple[str, int], Ids], stack: str, way: str, sampling: str
) -> None:
    compared = 0
    for (ran, name, number), ids in texts[stack].ids.items():
        if (ran, name) == (way, sampling):
            expected = plain[sampling, number]
            assert len(expected) == MAX_TOKENS
            assert ids == (expected[REPLAY_AT:] if way == "replayed" else expected), f"prompt {number}"
            compared += 1
    assert compared == PROMPTS_OF.get(stack, 12)


def test_sampling_differs_from_greedy(plain: dict[tuple[str, int], Ids]) -> None:
    assert sum(plain["greedy", number] != plain["sampled", number] for number in range(len(PROMPTS))) >= 10


@pytest.mark.parametrize("stack", ["draft_model", "two_groups"])
def test_a_draft_model_with_the_targets_weights_is_always_accepted(
    texts: dict[str, Texts], stack: str
) -> None:
    mine = texts[stack]
    assert mine.drafted > 300
    assert mine.rejected == 0


def test_a_head_drafts_in_almost_every_step(texts: dict[str, Texts]) -> None:
    for name, k in (("eagle_chain", 3), ("eagle_tree", 7)):
        assert texts[name].drafted > 0.8 * k * texts[name].steps


def test_the_exported_page_table_agrees_with_the_messages(texts: dict[str, Texts]) -> None:
    for name in ("ngram", "draft_model", "two_groups"):
        assert "page table of round" not in texts[name].log
