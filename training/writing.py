"""The target writes training data: user turns, then its answers, many at once.

Lanes are filled again as soon as a sequence ends, so that the batch stays full. What a lane has computed for
the beginning of its next sequence is kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from common.model.tokenizer import Tokenizer
from common.sampling.params import SamplingParams
from common.sampling.sampler import sample
from training.chat import ChatFormat
from training.seeds import Seed, draw_seed, up_to_last_sentence
from training.shards import Example
from training.target import Chunk, LastToken, RecordingTarget
from training.turns import MIN_ANSWER_TOKENS, TurnFilter, repeats_itself

PREFILL_ROWS = 256
"""Prompt tokens computed in one step beside the sequences that are being written."""
PASSAGES_KEPT = 2000
MIN_PASSAGE_TOKENS = 60
ANSWERED_TWICE = 0.4
"""Turns that get, behind the greedy answer, a sampled one: it needs no prompt computed."""
ANSWER_TEMPERATURES = (0.6, 0.8)
TURN_TEMPERATURES = (0.8, 1.0)


@dataclass(slots=True)
class _Lane:
    """ids: the sequence so far. computed: leading positions whose KV and states are there. written_from:
    where the part that is being written starts. given: that part is there already and is only to be read.
    turn: None while the user's text itself is being written."""

    page: int
    states: torch.Tensor
    top: torch.Tensor
    seed: Seed
    sampling: SamplingParams
    turn: str | None = None
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    written_from: int = 0
    given: bool = False

    @property
    def is_read(self) -> bool:
        return self.computed == len(self.ids) - 1

    def restart(self, ids: list[int], given: Sequence[int] = ()) -> None:
        """Another sequence; what is computed for a common beginning stays."""

        kept = 0
        for old, new in zip(self.ids[: self.computed], ids[:-1], strict=False):
            if old != new:
                break
            kept += 1
        self.ids = [*ids, *given]
        self.computed = kept
        self.written_from = len(ids)
        self.given = bool(given)


class Writer:
    """prompts: user turns to answer, in this order, instead of ones of the model's own. seed: repeats the
    run."""

    def __init__(
        self,
        target: RecordingTarget,
        tokenizer: Tokenizer,
        turns: TurnFilter,
        *,
        answer_tokens: int,
        seed: int,
        prompts: Sequence[str] | None = None,
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._chat = ChatFormat(tokenizer)
        self._turns = turns
        self._answer_tokens = answer_tokens
        self._chance = random.Random(seed)
        self._prompts = None if prompts is None else iter(prompts)
        self._passages: list[str] = []

    def sequences(self) -> Iterator[Example]:
        """Endless without prompts."""

        lanes: list[_Lane] = []
        for page in range(1, self._target.sequences + 1):
            lane = _Lane(
                page,
                torch.zeros(self._target.max_len, self._target.width, dtype=self._target.model.dtype),
                torch.full((self._target.max_len,), -1),
                Seed("", ""),
                SamplingParams(),
            )
            if self._begin(lane):
                lanes.append(lane)
        while lanes:
            done = self._step(lanes)
            for lane in done:
                if lane.turn is None:
                    if not self._answer(lane, self._written_turn(lane)) and not self._begin(lane):
                        lanes.remove(lane)
                    continue
                kept = len(lane.ids) - lane.written_from >= MIN_ANSWER_TOKENS
                if kept:
                    self._keep_passage(lane)
                    yield _example(lane)
                if not (kept and self._answer_again(lane)) and not self._begin(lane):
                    lanes.remove(lane)

    def _begin(self, lane: _Lane) -> bool:
        """The next user turn. False when there is none."""

        while True:
            if self._prompts is not None:
                prompt = next(self._prompts, None)
                if prompt is None:
                    return False
                lane.seed = Seed("given", prompt, limit=0)
            else:
                lane.seed = draw_seed(self._chance, self._passages)
            if lane.seed.limit:
                lane.turn = None
                lane.restart(self._chat.bare_turn(lane.seed.lead))
                lane.sampling = self._sampling(self._chance.uniform(*TURN_TEMPERATURES))
                return True
            if self._answer(lane, lane.seed.lead, lane.seed.answer):
                return True

    def _answer(self, lane: _Lane, turn: str, answer: str | None = None) -> bool:
        """Let the lane answer a turn that passes. answer: read instead of one of the model's own."""

        prompt = self._chat.prompt(turn)
        given = self._tokenizer.encode(answer, add_special=False) if answer else []
        length = len(prompt) + max(len(given), MIN_ANSWER_TOKENS)
        if length > self._target.max_len or not self._turns.passes(turn):
            return False
        lane.turn = turn
        lane.restart(prompt, given)
        lane.sampling = self._sampling(0.0)
        return True

    def _answer_again(self, lane: _Lane) -> bool:
        if lane.given or lane.sampling.temperature or self._chance.random() >= ANSWERED_TWICE:
            return False
        lane.restart(lane.ids[: lane.written_from])
        lane.sampling = self._sampling(self._chance.uniform(*ANSWER_TEMPERATURES))
        return True

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self._chance.getrandbits(63))

    def _step(self, lanes: Sequence[_Lane]) -> list[_Lane]:
        """One forward. The lanes that have ended what they wrote."""

        chunks: list[Chunk] = []
        reading: list[_Lane] = []
        budget = PREFILL_ROWS
        for lane in lanes:
            missing = min(len(lane.ids) - 1 - lane.computed, budget)
            if missing > 0:
                ids = lane.ids[lane.computed : lane.computed + missing]
                chunks.append(Chunk((lane.page,), lane.computed, ids))
                reading.append(lane)
                budget -= missing
        writing = [lane for lane in lanes if lane.is_read and not lane.given]
        lasts = [LastToken((lane.page,), len(lane.ids), lane.ids[-1:]) for lane in writing]
        states, logits = self._target.step(chunks, lasts)
        first = 0
        for lane, chunk in zip(reading, chunks, strict=True):
            end = chunk.start + len(chunk.ids)
            lane.states[chunk.start : end] = states[first : first + len(chunk.ids)]
            lane.top[chunk.start : end] = -1
            lane.computed = end
            first += len(chunk.ids)
        ended = [lane for lane in reading if lane.is_read and lane.given]
        for lane in ended:
            answer = slice(lane.written_from - 1, lane.computed)
            lane.top[answer] = self._target.choices(lane.states[answer])
        if not writing:
            return ended
        best = logits[:, : self._tokenizer.vocab_size].argmax(dim=-1).tolist()
        rows = logits.numpy()[:, : self._tokenizer.vocab_size]
        for at, lane in enumerate(writing):
            lane.states[lane.computed] = states[first + at]
            lane.top[lane.computed] = best[at]
            lane.computed += 1
            token = (
                best[at] if not lane.sampling.temperature else sample(rows[at], lane.sampling, len(lane.ids))
            )
            lane.ids.append(token)
            if self._has_ended(lane, token):
                ended.append(lane)
        return ended

    def _has_ended(self, lane: _Lane, token: int) -> bool:
        written = len(lane.ids) - lane.written_from
        if token in self._tokenizer.eos_ids or len(lane.ids) >= self._target.max_len:
            return True
        if lane.turn is not None:
            return written >= self._answer_tokens or repeats_itself(lane.ids[lane.written_from :])
        ends_line = lane.seed.one_line and b"\n" in self._tokenizer.token_bytes(token)
        return written >= lane.seed.limit or ends_line or self._tokenizer.is_special(token)

    def _written_turn(self, lane: _Lane) -> str:
        """The user's text that a lane has written; empty when it is of no use."""

        written = lane.ids[lane.written_from :]
        ended = written[-1] in self._tokenizer.eos_ids
        if ended:
            written = written[:-1]
        text = self._tokenizer.decode(written)
        if lane.seed.one_line:
            text, newline, _ = text.partition("\n")
            ended = ended or bool(newline)
        if any(map(self._tokenizer.is_special, written)) or (lane.seed.whole and not ended):
            return ""
        return (lane.seed.lead + (text if ended else up_to_last_sentence(text))).rstrip()

    def _keep_passage(self, lane: _Lane) -> None:
        written = lane.ids[lane.written_from :]
        if len(written) >= MIN_PASSAGE_TOKENS and lane.seed.kind in ("open", "opening", "question"):
            text = self._tokenizer.decode(
                [token for token in written if not self._tokenizer.is_special(token)]
            )
            self._passages.append(text.strip())
            del self._passages[:-PASSAGES_KEPT]


def _example(lane: _Lane) -> Example:
    assert lane.turn is not None
    length = len(lane.ids)
    assert lane.computed == length - 1
    answer = torch.zeros(length, dtype=torch.bool)
    answer[lane.written_from :] = True
    states = lane.states[:length].clone()
    states[length - 1] = 0
    top = lane.top[:length].clone()
    top[length - 1] = -1
    return Example(torch.tensor(lane.ids), answer, top, states, lane.turn, lane.seed.kind)
