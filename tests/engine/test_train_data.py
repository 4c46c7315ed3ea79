"""How the target writes its own training data."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.data import DataPlan, all_sequences, write_data
from training.evaluation import is_greedy
from training.options import parse_options
from training.seeds import WEIGHTS, draw_seed, up_to_last_sentence
from training.turns import TurnFilter, is_monotonous, read_all_turns, read_prompts, repeats_itself
from training.writing import Writer

EOS, VOCAB = 128, 131
LAYERS = (0, 1)


class Template:
    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return f"SYSTEM|{messages[0]['content']}|"


class Tokenizer:
    """Ids are ASCII; 128 ends a text, 129 is special."""

    vocab_size = 130
    eos_ids = frozenset({EOS})
    chat_template = Template()

    def encode(self, text: str, add_special: bool) -> list[int]:
        return list(text.encode("ascii", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < 128).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 128 else b""

    def is_special(self, token_id: int) -> bool:
        return token_id >= 128


class Target:
    """Its logits and states are hashes of all ids up to the position, as its KV memory has them."""

    def __init__(self, sequences: int, max_len: int = 240) -> None:
        self.sequences, self.max_len, self.layers, self.width = sequences, max_len, LAYERS, 3
        self.model = SimpleNamespace(dtype=torch.bfloat16)
        self.held: dict[int, list[int]] = {}
        self.rows: list[int] = []

    def step(self, chunks, lasts) -> tuple[torch.Tensor, torch.Tensor]:
        states, logits = [], []
        work = [(chunk.pages[0], chunk.start, chunk.ids) for chunk in chunks]
        work += [(last.pages[0], last.base - 1, last.tokens) for last in lasts]
        self.rows.append(len(lasts))
        for page, start, ids in work:
            held = self.held.setdefault(page, [])
            assert start <= len(held), "a position was skipped"
            held[start:] = ids
            states += [state_of(held[: start + at + 1]) for at in range(len(ids))]
        for last in lasts:
            logits.append(logits_of(self.held[last.pages[0]]))
        return torch.stack(states).bfloat16(), torch.stack(logits) if logits else torch.empty(0, VOCAB)


def state_of(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([zlib.crc32(bytes(ids)) % 251, len(ids), ids[-1]]).float()


def logits_of(ids: Sequence[int]) -> torch.Tensor:
    logits = torch.zeros(VOCAB)
    draws = torch.rand(130, generator=torch.Generator().manual_seed(zlib.crc32(bytes(ids))))
    logits[32:127] = 4 * draws[32:127]
    logits[10] = 3 * draws[10]
    logits[EOS] = 3.9 if draws[0] < 0.1 else -9.0
    logits[130] = 99.0  # no token of the tokenizer
    return logits


def written(count: int, **options) -> tuple[list, Target]:
    target = Target(options.pop("lanes", 5))
    writer = Writer(target, Tokenizer(), TurnFilter([]), **{"answer_tokens": 40, "seed": 3, **options})
    return list(islice(writer.sequences(), count)), target


@pytest.fixture(scope="module")
def sequences():
    return written(90)[0]


def test_what_is_recorded_at_a_position_belongs_to_the_ids_before_it(sequences):
    for one in sequences[::3]:
        ids = one.ids.tolist()
        length = len(ids)
        assert one.states.shape == (length, 3)
        assert torch.equal(
            one.states[: length - 1],
            torch.stack([state_of(ids[: at + 1]) for at in range(length - 1)]).bfloat16(),
        )
        first = int(torch.nonzero(one.answer)[0])
        assert one.answer.tolist() == [at >= first for at in range(length)]
        for at in range(first - 1, length - 1):
            assert int(one.top[at]) == int(logits_of(ids[: at + 1])[:130].argmax())


def test_answers_stand_behind_the_rendered_turn_and_end_in_time(sequences):
    for one in sequences:
        first = int(torch.nonzero(one.answer)[0])
        assert (
            Tokenizer().decode(one.ids[:first].tolist())
            == f"SYSTEM|{one.turn}|".encode("ascii", "replace").decode()
        )
        assert 8 <= one.answer_tokens <= 40
        assert EOS not in one.ids[:-1].tolist()
    assert len({one.kind for one in sequences}) >= 5


def test_a_turn_is_answered_greedily_first_and_at_most_twice(sequences):
    answers: dict[str, list[bool]] = {}
    for one in sequences:
        answers.setdefault(one.turn, []).append(is_greedy(one))
    assert all(len(ones) <= 2 and ones[0] for ones in answers.values())
    twice = [ones for ones in answers.values() if len(ones) == 2]
    assert len(twice) > 10
    assert any(not ones[1] for ones in twice)


def test_the_batch_stays_full():
    _, target = written(40, lanes=8)
    busy = target.rows[5:]
    assert sum(busy) / len(busy) > 6


def test_given_prompts_are_answered_in_order_and_once():
    prompts = ["what is a tree?", "What is a tree!", "name three rivers", "x", "why is the sky so blue"]
    target = Target(1)
    writer = Writer(target, Tokenizer(), TurnFilter([]), answer_tokens=20, seed=1, prompts=prompts)
    turns = [one.turn for one in writer.sequences()]
    assert list(dict.fromkeys(turns)) == [prompts[0], prompts[2], prompts[4]]


def test_forbidden_turns_never_pass():
    turns = TurnFilter(["Write a POEM about rivers."])
    assert not turns.passes("write a poem about rivers")
    assert turns.passes("write a poem about two rivers")
    assert not turns.passes("Write a poem  about two rivers!")
    assert not turns.passes("too short")
    assert not turns.passes("no no no yes " * 9)
    assert is_monotonous("no no no yes " * 9)


def test_an_answer_ends_where_it_goes_in_circles():
    assert repeats_itself([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1])
    assert not repeats_itself([1, 2, 3, 1, 2, 3, 1, 2, 3, 4])
    assert not repeats_itself([5] * 9)
    assert repeats_itself([5] * 10)

    class Stuck(Target):
        def step(self, chunks, lasts) -> tuple[torch.Tensor, torch.Tensor]:
            states, logits = super().step(chunks, lasts)
            logits[:, ord("a")] = 50.0
            return states, logits

    writer = Writer(
        Stuck(1), Tokenizer(), TurnFilter([]), answer_tokens=40, seed=1, prompts=["say something long"]
    )
    assert {one.answer_tokens for one in writer.sequences()} == {10}


def test_writing_goes_on_where_it_was(tmp_path):
    prompts = tuple(f"say something about the number {n}" for n in range(80))
    plan = DataPlan(tmp_path, answer_tokens=400, longest_answer=30, seed=1, prompts=prompts)
    assert write_data(plan, Target(4), Tokenizer(), "m", threading.Event()) >= 400
    first = all_sequences(tmp_path, model_identity="m", layers=LAYERS)
    more = replace(plan, answer_tokens=900)
    total = write_data(more, Target(4), Tokenizer(), "m", threading.Event())
    both = all_sequences(tmp_path, model_identity="m", layers=LAYERS)
    assert total == sum(one.answer_tokens for one in both) >= 900
    assert [one.turn for one in both[: len(first)]] == [one.turn for one in first]
    old = {one.turn for one in first}
    assert not old & {one.turn for one in both[len(first) :]}
    target = Target(4)
    write_data(more, target, Tokenizer(), "m", threading.Event())
    assert not target.rows


def test_a_stopped_writer_keeps_what_it_has(tmp_path):
    stop = threading.Event()
    stop.set()
    plan = DataPlan(tmp_path, answer_tokens=4000, longest_answer=30, seed=1)
    assert 0 < write_data(plan, Target(4), Tokenizer(), "m", stop) < 4000
    assert len(all_sequences(tmp_path, model_identity="m", layers=LAYERS)) == 1


def test_seeds_of_all_kinds_are_drawn():
    chance = random.Random(0)
    passages = [f"Rivers run to the sea, number {n}. They are long." for n in range(50)]
    seeds = [draw_seed(chance, passages) for _ in range(600)]
    assert {seed.kind for seed in seeds} == set(WEIGHTS)
    assert {draw_seed(chance, []).kind for _ in range(300)} == set(WEIGHTS) - {
        "passage_summary",
        "passage_question",
        "copy",
    }
    assert up_to_last_sentence("One. Two! Thr") == "One. Two!"
    assert up_to_last_sentence("nothing ends") == "nothing ends"


def test_prompts_are_read_from_any_of_three_forms(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a"\n\n{"prompt": "b"}\n{"turns": ["c", "d"]}\n')
    assert read_prompts(path) == ["a", "b", "c"]
    assert read_all_turns(path) == ["a", "b", "c", "d"]
    for bad in ("[1]", "{}", "nonsense", '{"turns": []}', '{"prompt": 3}'):
        path.write_text(f'"a"\n{bad}\n')
        with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
            read_prompts(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out"),
        (["--out", "x", "--steps", "0"], "'0' is not a whole number of at least 1"),
        (["--out", "x", "--lanes", "-3"], "not a whole number"),
        (["--out", "x", "--learning-rate", "7"], "between 0 and 1"),
        (["--out", "x", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (["--out", "x", "--answer-tokens", "1024"], "does not fit --max-len 1024"),
    ],
)
def test_wrong_options_are_refused_in_words(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
