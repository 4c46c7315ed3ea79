"""What a drafter that reads the target's states keeps to, on a tiny target and a random head."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.attention.kv_cache import KvCache
from common.attention.segments import build_batch
from common.graphs.padded import padded_rows
from common.kernels.build import KernelsUnavailable
from common.model.eagle3 import Eagle3Head
from common.model.llama import LlamaModel
from common.model.steps import CapturedRows
from common.sampling.params import SamplingParams
from services.draft.drafters import eagle3
from services.draft.drafters.eagle3 import Eagle3Drafter
from services.draft.eagle import bound
from services.draft.eagle.attention import DecodeAttention, DecodePlan, ExtendAttention
from services.draft.eagle.compiled import CompiledForward, DecodeKeys, ExtendKeys, GrowingKeys
from services.draft.eagle.entries import Places
from services.draft.eagle.forward import EagleForward
from services.draft.eagle.growth import Shape
from services.draft.work import DraftRow, DraftWork, HiddenRows
from services.target.memory import HiddenBlock
from services.target.work import Capture, PrefillChunk, RoundWork, TreeRows
from tests.engine.eagle_pair import (
    GREEDY,
    HIDDEN,
    LAYERS,
    PAGE,
    POSITIONS,
    SLOT_PAGES,
    VOCAB,
    Ids,
    Pair,
    eagle_drafter,
    prompt,
    random_head,
    tiny_target,
)

CHAIN, TREE = Shape(width=1), Shape(width=3, depth=4)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
WHOLE = [(0, 20)]
CHUNKS = [(0, 7), (7, 8), (8, 20)]


FORWARDS: dict[str, type[Any]] = {"torch": EagleForward, "compiled": CompiledForward}


@pytest.fixture(params=FORWARDS, autouse=True)
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Each rule holds with the compiled kernels and with their twin."""
    if request.param == "torch":

        def unavailable(*_: object, **__: object) -> None:
            raise KernelsUnavailable("kept away by the test")

        monkeypatch.setattr(bound, "CompiledHead", unavailable)
    return FORWARDS[request.param]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return tiny_target(tmp_path_factory.mktemp("tiny"))


def prefilled(model: LlamaModel, shape: Shape = CHAIN, chunks: list[tuple[int, int]] = WHOLE) -> Pair:
    """A prompt whose every chunk was read when it was there."""
    made = Pair(model, eagle_drafter(shape))
    for chunk in chunks:
        made.prefill_chunk(1, prompt(), chunk)
        made.draft(1, k=0)
    return made


def entries(pair: Pair, slot: int, start: int, end: int) -> torch.Tensor:
    """The KV of a slot's entries, as integers: [2, positions, numbers]."""
    places = [SLOT_PAGES[slot][at // PAGE] * PAGE + at % PAGE for at in range(start, end)]
    return pair.kv.view(2, PAGE * 64, -1)[:, places]


# Entries


def reference_chain(pair: Pair, model: LlamaModel, ids: Ids, holes: set[int], count: int) -> Ids:
    """Greedy drafts of a plain head that attends over entries one query at a time. holes: positions without
    an entry."""
    config, weights = random_head()
    head = Eagle3Head(
        config, weights, dtype=torch.bfloat16, embedding=model.embedding, max_positions=POSITIONS + 40
    )
    states = hidden_states(pair, ids)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def enter(feature: torch.Tensor, token: int, position: int) -> torch.Tensor:
        q, k, v = head.queries_keys_values(feature, torch.tensor([token]), torch.tensor([position - 1]))
        keys.append(k[0].float())
        values.append(v[0].float())
        group = config.heads // config.kv_heads
        k_all = torch.stack(keys).repeat_interleave(group, dim=1)
        v_all = torch.stack(values).repeat_interleave(group, dim=1)
        weights_ = torch.einsum("hd,khd->hk", q[0].float(), k_all).softmax(-1)
        attended = torch.einsum("hk,khd->hd", weights_, v_all)
        return head.output(feature, attended.flatten().bfloat16().unsqueeze(0))

    for position in range(1, len(ids)):
        if position not in holes:
            output = enter(head.fuse(states[position - 1 : position]), ids[position], position)
    drafted: list[int] = []
    for step in range(count):
        drafted.append(int(head.target_ids[head.logits(output).argmax()]))
        output = enter(head.feature(output), drafted[-1], len(ids) + step)
    return tuple(drafted)


def hidden_states(pair: Pair, ids: Ids) -> torch.Tensor:
    """The target's states of all ids, from one forward with a cache of its own."""
    model = pair.runner.model
    cache = KvCache.allocate(model.config, 64 * PAGE, model.dtype)
    chunk = PrefillChunk(1, SLOT_PAGES[1], 0, ids)
    rows = torch.empty(padded_rows(len(ids)), len(LAYERS) * HIDDEN, dtype=model.dtype)
    model.forward(build_batch([chunk], [], PAGE), cache, capture=CapturedRows(LAYERS, rows))
    return rows[: len(ids)]


def chain(pair: Pair, k: int = 4) -> Ids:
    (tree,) = pair.draft(1, k=k).trees
    return tree.tokens[1:]


def test_a_chain_is_what_a_plain_head_drafts(model: LlamaModel) -> None:
    pair = prefilled(model, chunks=CHUNKS)
    for _ in range(4):
        (tree,) = pair.draft(1).trees
        assert tree.parents == (-1, 0, 1, 2, 3)
        assert tree.tokens[1:] == reference_chain(pair, model, pair.slots[1].ids, set(), 4)
        pair.verify({1: (tree.tokens, tree.parents)})


def test_a_prompt_in_chunks_leaves_the_entries_that_it_leaves_whole(model: LlamaModel) -> None:
    whole, chunked = prefilled(model), prefilled(model, chunks=CHUNKS)
    assert torch.equal(entries(whole, 1, 1, 21), entries(chunked, 1, 1, 21))
    assert chain(whole) == chain(chunked)


def test_entries_that_wait_are_those_that_were_written_at_once(model: LlamaModel) -> None:
    """Verdicts are taken in without an extend until there is something to draft, or enough of them."""
    waits = Pair(model, eagle_drafter(CHAIN, patience=8))
    at_once = Pair(model, eagle_drafter(CHAIN))
    for pair in (waits, at_once):
        pair.prefill_chunk(1, prompt(), (0, 6))
        pair.draft(1, k=0)
    assert entries(waits, 1, 1, 7).eq(0xFF).all()
    for pair in (waits, at_once):
        pair.prefill_chunk(1, prompt(), (6, 20))
        pair.draft(1, k=0)
    assert torch.equal(entries(waits, 1, 1, 21), entries(at_once, 1, 1, 21))
    for _ in range(3):
        for pair in (waits, at_once):
            pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
            pair.draft(1, k=0)
    assert entries(waits, 1, 21, 24).eq(0xFF).all()
    assert chain(waits) == chain(at_once)
    assert torch.equal(entries(waits, 1, 1, 24), entries(at_once, 1, 1, 24))


def test_a_log_of_one_id_has_no_entry_to_draft_from(model: LlamaModel) -> None:
    """Whatever the slot's owner before it left there."""
    pair = prefilled(model)
    assert pair.draft(1).trees
    row = DraftRow(1, (99, 2), (5,), 0, POSITIONS, 4, SamplingParams(), ())
    assert pair.drafter.draft(DraftWork(0, 9, (row,), (1,))).trees == ()


@pytest.mark.parametrize("invalid_from", [0, 21, 22, 23])
def test_what_waits_for_ids_that_were_not_committed_is_dropped(model: LlamaModel, invalid_from: int) -> None:
    pair = Pair(model, eagle_drafter(CHAIN, patience=8))
    pair.prefill_chunk(1, prompt(), (0, 20))
    pair.draft(1, k=0)
    for _ in range(3):
        pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
        pair.draft(1, k=0)
    slot = pair.slots[1]
    slot.handed = slot.ids[:invalid_from]
    assert bool(pair.draft(1).trees) == (invalid_from > 23)
    written = entries(pair, 1, 21, 24).ne(0xFF).any(-1).all(0).tolist()
    assert written == [position < invalid_from for position in range(21, 24)]


def test_what_waits_for_a_slot_that_is_not_at_hand_goes_on_waiting(model: LlamaModel) -> None:
    """It may be another group's, and its pages another slot's by now."""
    pair = Pair(model, eagle_drafter(CHAIN, patience=8))
    for slot in (1, 2):
        pair.prefill_chunk(slot, prompt(slot), (0, 20))
    pair.draft(1, 2, k=0)
    pair.verify({slot: (pair.slots[slot].ids[-1:], (-1,)) for slot in (1, 2)})
    pair.draft(1, 2, k=0)
    assert pair.draft(2).trees
    assert entries(pair, 1, 21, 22).eq(0xFF).all()
    assert entries(pair, 2, 21, 22).ne(0xFF).any(-1).all()
    assert pair.draft(1).trees
    assert entries(pair, 1, 21, 22).ne(0xFF).any(-1).all()


def test_ids_are_rotated_by_one_and_the_tail_of_a_chunk_is_the_next_prompt_id(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, forward: type[Any]
) -> None:
    seen: list[tuple[Ids, Ids]] = []
    original = forward.extend

    def spy(self: Any, features, ids, plan):
        assert ids.dtype == torch.int64
        seen.append((tuple(ids.tolist()), tuple(plan.positions.tolist())))
        return original(self, features, ids, plan)

    monkeypatch.setattr(forward, "extend", spy)
    prefilled(model, chunks=CHUNKS)
    assert seen == [(prompt()[start + 1 : end + 1], tuple(range(start, end))) for start, end in CHUNKS]


def test_extend_over_the_accepted_path_writes_the_true_entries(model: LlamaModel) -> None:
    """Whatever tree was verified, accepted nodes leave the entries of a prompt that said the same."""
    pair, plain = prefilled(model), prefilled(model)
    right: Ids = ()
    while len(right) < 4:
        right += plain.verify({1: (plain.slots[1].ids[-1:], (-1,))})[1]
    bonus, (first, second, third) = prompt()[-1], right[:3]
    wrong = (first + 1) % VOCAB
    tokens, parents = (bonus, wrong, first, wrong, second, third), (-1, 0, 0, 1, 2, 4)
    assert pair.verify({1: (tokens, parents)})[1] == right[:4]
    pair.draft(1, k=0)
    whole = Pair(model, eagle_drafter(CHAIN))
    whole.prefill_chunk(1, prompt() + right[:4], (0, 24))
    whole.draft(1, k=0)
    assert torch.equal(entries(pair, 1, 1, 25), entries(whole, 1, 1, 25))


# What may be read


def test_rows_that_were_missed_leave_holes_that_attention_masks(model: LlamaModel) -> None:
    pair = prefilled(model)
    tokens = pair.slots[1].ids[-1:]
    pair.verify({1: (tokens, (-1,))}, capture=False)
    assert pair.draft(1).trees == (), "the bonus token has no entry"
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    assert chain(pair) == reference_chain(pair, model, pair.slots[1].ids, {21}, 4)


def test_what_unwritten_memory_holds_does_not_matter(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))}, capture=False)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    assert entries(pair, 1, 21, 22).eq(0xFF).all(), "a hole was written"
    drafted = chain(pair)
    assert drafted == reference_chain(pair, model, pair.slots[1].ids, {21}, 4)


def test_entries_of_ids_that_were_not_committed_are_not_read(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    pair.draft(1)
    turned = (*pair.slots[1].ids[:-1], (pair.slots[1].ids[-1] + 7) % VOCAB)
    pair.slots[1].ids = turned
    assert pair.draft(1).trees == (), "the entry of the token that was not committed is gone"


def test_a_slot_that_shares_pages_finds_the_entries_in_them(model: LlamaModel) -> None:
    """As after a prefix hit: the leading pages are another slot's, the first entry behind them is a hole."""
    pair = prefilled(model)
    shared = SLOT_PAGES[1][:4]
    pair.use_pages(2, (*shared, *SLOT_PAGES[2][4:]))
    ids = (*prompt()[:18], 5, 6, 7)
    pair.prefill_chunk(2, ids, (16, 20))
    pair.draft(2, k=0)
    drafter = pair.drafter
    assert drafter._attached is not None
    valid = drafter._attached.entries.valid[2]
    assert valid[:21].tolist() == [False, *[True] * 15, False, *[True] * 4]
    (tree,) = pair.draft(2).trees
    assert tree.tokens[1:] == reference_chain(pair, model, ids, {16}, 4)


def test_a_page_with_entries_of_other_ids_is_a_hole(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.use_pages(2, (*SLOT_PAGES[1][:4], *SLOT_PAGES[2][4:]))
    ids = (9, *prompt()[1:])
    pair.prefill_chunk(2, ids, (16, 20))
    pair.draft(2, k=0)
    assert pair.drafter._attached is not None
    assert not pair.drafter._attached.entries.valid[2, :17].any()


def test_a_page_is_forgotten_when_entries_of_other_ids_are_written_to_it(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.use_pages(2, SLOT_PAGES[1])
    pair.prefill_chunk(2, (9, *prompt()[1:]), (0, 2))
    pair.draft(2, k=0)
    pair.use_pages(3, SLOT_PAGES[1])
    pair.prefill_chunk(3, prompt(), (16, 20))
    pair.draft(3, k=0)
    assert pair.drafter._attached is not None
    assert not pair.drafter._attached.entries.valid[3, :17].any()


def test_a_page_is_remembered_for_what_was_written_to_it_last(model: LlamaModel) -> None:
    pair = prefilled(model)
    other, (head, tail) = (9, *prompt()[1:]), (0, 16)
    for slot, ids, start in ((2, other, head), (2, other, head), (3, (*other[:20], 7), tail)):
        pair.slots.pop(slot, None)
        pair.use_pages(slot, SLOT_PAGES[1])
        pair.prefill_chunk(slot, ids, (start, 20))
        pair.draft(slot, k=0)
    assert pair.drafter._attached is not None
    assert pair.drafter._attached.entries.valid[3, 1:16].all()


def test_a_slot_with_a_new_owner_reads_nothing_of_the_one_before(model: LlamaModel) -> None:
    pair = prefilled(model)
    row = replace(pair.row(1, 4), key=(9, 1), ids=(3, *prompt()[1:]), hidden=())
    assert pair.drafter.draft(DraftWork(0, 2, (row,), ())).trees == ()


# Poisoned, stale and truncated blocks


def test_a_poisoned_block_is_refused_and_leaves_a_hole(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    rows = pair.slots[1].unread[0]
    pair.rows[rows.block, rows.first, 5] = float("nan")
    drafts = pair.draft(1)
    assert (drafts.trees, drafts.faults) == ((), ("poisoned",))
    assert entries(pair, 1, 21, 22).eq(0xFF).all()


def test_a_block_that_holds_another_round_is_refused(model: LlamaModel) -> None:
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    pair.tags[pair.slots[1].unread[0].block] += 2
    drafts = pair.draft(1)
    assert (drafts.trees, drafts.faults) == ((), ("stale",))


@pytest.mark.parametrize("tags", [(0, 0), (0, 1), (1, 0), (1, 3)])
def test_a_block_that_is_written_while_it_is_read_is_refused(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, tags: tuple[int, int]
) -> None:
    """tags: rounds after the block's own, before and after its rows were copied; 1 is its own."""
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    rows = pair.slots[1].unread[0]
    tag = pair.tags[rows.block : rows.block + 1]
    before, after = ((0, rows.round, 0, rows.round + 2)[at] for at in tags)
    original = eagle3._states

    def copy(*args):
        copied = original(*args)
        tag.fill_(after)
        return copied

    monkeypatch.setattr(eagle3, "_states", copy)
    tag.fill_(before)
    drafts = pair.draft(1)
    assert (drafts.trees, drafts.faults) == ((), ("stale",))


@pytest.mark.parametrize(
    "lie", [{"first": 60, "count": 9}, {"block": 4}, {"block": -1}, {"first": -1}, {"start": -3}]
)
def test_a_truncated_block_is_refused(model: LlamaModel, lie: dict[str, int]) -> None:
    pair = prefilled(model)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    rows: HiddenRows = pair.slots[1].unread[0]
    pair.slots[1].unread = [replace(rows, **lie)]
    drafts = pair.draft(1)
    assert (drafts.trees, drafts.faults) == ((), ("truncated",))


# The target's side


def test_nothing_is_readable_after_a_failed_capture(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what the block held before: its rows are no longer those of the round that it named."""
    pair = Pair(model, eagle_drafter(CHAIN))
    pair.prefill_chunk(1, prompt(), (0, 8))
    block, tag = pair.rows[1].clone(), pair.tags[1:2]
    pair.prefill_chunk(1, prompt(), (8, 12))
    assert pair.tags.tolist() == [2, 1, 0, 0]
    claimed = list(pair.slots[1].unread)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(LlamaModel, "_logits", fail)
        with pytest.raises(RuntimeError):
            pair.prefill_chunk(1, prompt(), (12, 20))
    assert not torch.equal(pair.rows[1].nan_to_num(7), block.nan_to_num(7)), "the forward wrote, then failed"
    assert pair.tags.tolist() == [2, 0, 0, 0]
    assert pair.slots[1].unread == claimed
    assert pair.draft(1).faults == ("stale",), "of the two rounds before one is left"
    chunk = PrefillChunk(1, SLOT_PAGES[1], 12, prompt()[12:20])
    result = pair.runner.execute(RoundWork(0, 9, (chunk,), ()), HiddenBlock(pair.rows[1], tag))
    assert result.hidden == ()
    assert pair.tags.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_block_holds_the_rows_of_its_spans_slot_by_slot(model: LlamaModel, order: tuple[int, int]) -> None:
    """Chunks and trees of two slots in one forward: rows of nodes that were not accepted leave, and rows of a
    chunk move down past a tree of the slot before it."""
    pair = Pair(model, eagle_drafter(CHAIN))
    texts = {1: prompt(), 2: prompt(3, 20)}
    plain = Pair(model, eagle_drafter(CHAIN))
    plain.prefill_chunk(1, texts[1], (0, 20))
    said: Ids = ()
    while len(said) < 3:
        said += plain.verify({1: (plain.slots[1].ids[-1:], (-1,))})[1]
    wrong = (said[0] + 1) % VOCAB
    tree = TreeRows(
        1, SLOT_PAGES[1], 21, (texts[1][20], wrong, said[0], wrong, said[1]), (-1, 0, 0, 1, 2), GREEDY
    )
    chunks = tuple(PrefillChunk(slot, SLOT_PAGES[slot], 0, texts[slot][:20]) for slot in order)
    result = pair.runner.execute(
        RoundWork(0, 1, chunks, (tree,), Capture(1, 1, LAYERS)), HiddenBlock(pair.rows[1], pair.tags[1:2])
    )
    assert result.trees[0].ids == said[:3]
    wanted = {1: hidden_states(pair, texts[1] + said[:2]), 2: hidden_states(pair, texts[2])}
    assert [span.slot for span in result.hidden] == list(order)
    for span in result.hidden:
        assert torch.equal(pair.rows[1, span.first : span.first + span.count], wanted[span.slot])


def test_states_are_consumed_once_and_dropped_before_activations_are_allocated(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, forward: type[Any]
) -> None:
    states: list[weakref.ref[torch.Tensor]] = []
    extended = 0
    fuse, extend = forward.fuse, forward.extend

    def spy(self: Any, given: torch.Tensor) -> torch.Tensor:
        states.append(weakref.ref(given))
        return fuse(self, given)

    def check(self: Any, *args) -> torch.Tensor:
        nonlocal extended
        extended += 1
        assert states[-1]() is None
        return extend(self, *args)

    monkeypatch.setattr(forward, "fuse", spy)
    monkeypatch.setattr(forward, "extend", check)
    pair = prefilled(model)
    pair.draft(1)
    assert (len(states), extended) == (1, 1)


def test_the_model_reads_its_embedding_where_it_was_moved(model: LlamaModel, tmp_path: Path) -> None:
    other = tiny_target(tmp_path)
    plain = hidden_states(Pair(other, eagle_drafter(CHAIN)), prompt())
    moved = torch.empty_like(other.embedding).copy_(other.embedding)
    pair = Pair(other, eagle_drafter(CHAIN))
    pair.runner.read_embedding_at(moved)
    pair.prefill_chunk(1, prompt(), (0, 20))
    assert other.embedding.data_ptr() == moved.data_ptr()
    assert torch.equal(hidden_states(pair, prompt()), plain)
    moved.fill_(0.0)
    assert not torch.equal(hidden_states(pair, prompt()), plain)


# What a forward leaves alone


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_forward_touches_no_length_and_no_memory_but_its_own_new_entries(
    model: LlamaModel, shape: Shape
) -> None:
    pair = prefilled(model, shape)
    pair.verify({1: (pair.slots[1].ids[-1:], (-1,))})
    ids, table = pair.slots[1].ids, pair.table.clone()
    rows, tags, kv = pair.rows.clone(), pair.tags.clone(), pair.kv.clone()
    assert pair.draft(1).trees
    assert pair.slots[1].ids == ids
    assert torch.equal(pair.table, table)
    assert torch.equal(pair.tags, tags)
    assert torch.equal(pair.rows.nan_to_num(7), rows.nan_to_num(7))
    changed = (pair.kv != kv).view(2, 64 * PAGE, -1).any(-1).any(0).nonzero().flatten().tolist()
    assert changed == [SLOT_PAGES[1][21 // PAGE] * PAGE + 21 % PAGE]


@pytest.mark.parametrize("allocated", [8, 16, 20, 21])
def test_nothing_is_written_past_the_allocated_length_and_lengths_only_grow(
    model: LlamaModel, allocated: int
) -> None:
    pair = Pair(model, eagle_drafter(TREE))
    pair.prefill_chunk(1, prompt(), (0, 20))
    trees = pair.draft(1, allocated=allocated).trees
    assert bool(trees) == (allocated >= 21)
    assert entries(pair, 1, allocated, 40).eq(0xFF).all()
    assert entries(pair, 1, 1, allocated).ne(0xFF).any(-1).all()


def test_ids_are_plain_integers_at_the_border_and_int64_inside(model: LlamaModel) -> None:
    pair = prefilled(model)
    (tree,) = pair.draft(1).trees
    assert all(type(one) is int for one in (*tree.tokens, *tree.parents))
    bound_to = forward_of(pair.drafter)
    assert bound_to.target_ids.dtype == torch.int64
    outputs = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    places = Places(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    plan = bound_to.plan_steps(places, 1)
    with pytest.raises(TypeError, match="int64"):
        bound_to.step(
            outputs,
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
            plan,
            torch.zeros(1, 1, 1, dtype=torch.int64),
        )


def forward_of(drafter: Eagle3Drafter) -> Any:
    assert drafter._attached is not None
    return drafter._attached.forward


def test_each_pass_uses_the_backend_that_was_bound_for_it(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch, forward: type[Any]
) -> None:
    used: list[str] = []

    def spy(name: str, kind: type, method: str) -> None:
        original = getattr(kind, method)

        def called(self, *args):
            used.append(name)
            return original(self, *args)

        monkeypatch.setattr(kind, method, called)

    compiled = forward is CompiledForward
    spy("extend", *((ExtendKeys, "plan") if compiled else (ExtendAttention, "attend")))
    if compiled:
        spy("trees", CompiledForward, "grow")
    spy("decode plan", DecodeKeys if compiled else DecodeAttention, "plan")
    spy("decode", *((GrowingKeys, "next_level") if compiled else (DecodePlan, "attend")))
    pair = Pair(model, eagle_drafter(CHAIN))
    pair.prefill_chunk(1, prompt(), (0, 20))
    assert used == [], "the target's passes have a backend of their own"
    pair.draft(1, k=0)
    assert used == ["extend"]
    used.clear()
    pair.draft(1, k=3)
    assert used == (["trees"] if compiled else ["decode plan", "decode", "decode"])
    used.clear()
    sampled = Pair(model, eagle_drafter(CHAIN))
    sampled.prefill_chunk(1, prompt(), (0, 20), SAMPLED)
    sampled.draft(1, k=3)
    assert used == ["extend", "decode plan", "decode", "decode"]


# Together


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_the_text_is_that_of_plain_decoding(
    model: LlamaModel, shape: Shape, sampling: SamplingParams
) -> None:
    plain, drafted = Pair(model, eagle_drafter(shape)), Pair(model, eagle_drafter(shape))
    for one in (plain, drafted):
        one.prefill_chunk(1, prompt(), (0, 20), sampling)
        one.prefill_chunk(2, prompt(3), (0, 20), sampling)
    while min(len(one.ids) for one in plain.slots.values()) < 45:
        plain.verify({slot: (plain.slots[slot].ids[-1:], (-1,)) for slot in (1, 2)})
    proposed = 0
    while min(len(one.ids) for one in drafted.slots.values()) < 45:
        trees = drafted.trees(1, 2)
        proposed += sum(len(tokens) - 1 for tokens, _ in trees.values())
        drafted.verify(trees)
    assert proposed > 80
    for slot in (1, 2):
        assert drafted.slots[slot].ids[:45] == plain.slots[slot].ids[:45]


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_slots_that_draft_together_draft_what_they_draft_alone(model: LlamaModel, shape: Shape) -> None:
    together, alone = Pair(model, eagle_drafter(shape)), Pair(model, eagle_drafter(shape))
    for one in (together, alone):
        one.prefill_chunk(1, prompt(), (0, 20))
        one.prefill_chunk(2, prompt(3, 11), (0, 10))
    first = {tree.slot: tree for tree in together.draft(1, 2).trees}
    assert [first[1], first[2]] == [*alone.draft(1).trees, *alone.draft(2).trees]


def test_a_capture_for_a_draft_without_a_block_captures_nothing(model: LlamaModel) -> None:
    pair = Pair(model, eagle_drafter(CHAIN))
    chunk = PrefillChunk(1, SLOT_PAGES[1], 0, prompt()[:20])
    assert pair.runner.execute(RoundWork(0, 1, (chunk,), (), Capture(9, 0, LAYERS)), None).hidden == ()
