"""From answers to the figures of one measurement, and over rounds to medians and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.load import Answer


@dataclass(frozen=True, slots=True)
class Figures:
    """One server at one number of streams in one round.

    tokens_per_s: completion tokens over the wall time of the whole load, prompts included.
    decode_tokens_per_s: of a stream, from its first text to its end. first_token_s: median.
    by_group: completion tokens over the summed time of a group's own answers.
    """

    server: str
    streams: int
    round: int
    answers: int
    completion_tokens: int
    tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    by_group: dict[str, float]


def figures_of(server: str, streams: int, round_: int, answers: Sequence[Answer]) -> Figures:
    completion_tokens = sum(one.completion_tokens for one in answers)
    wall_s = max(one.ended_at for one in answers) - min(one.sent_at for one in answers)
    decoding = [one for one in answers if one.completion_tokens > 1 and one.ended_at > one.first_text_at]
    decoded = sum(one.completion_tokens - 1 for one in decoding)
    decode_s = sum(one.ended_at - one.first_text_at for one in decoding)
    groups = sorted({one.group for one in answers})
    return Figures(
        server,
        streams,
        round_,
        len(answers),
        completion_tokens,
        completion_tokens / wall_s,
        decoded / decode_s if decoding else 0.0,
        median(one.first_text_at - one.sent_at for one in answers),
        {group: _rate([one for one in answers if one.group == group]) for group in groups},
    )


def _rate(answers: Sequence[Answer]) -> float:
    return sum(one.completion_tokens for one in answers) / sum(one.ended_at - one.sent_at for one in answers)


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over rounds. ratio: median over rounds of tokens_per_s over the baseline's in the same round;
    0 where the baseline was not measured."""

    server: str
    streams: int
    rounds: int
    tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    ratio: float
    by_group: dict[str, float]


def summarise(figures: Sequence[Figures], baseline: str) -> list[Summary]:
    """One row for every server and number of streams, in order of first appearance.

    Ratios are taken within a round before the median, so that what slows the machine for one round does not
    count against whoever was measured in it.
    """
    base = {(one.round, one.streams): one.tokens_per_s for one in figures if one.server == baseline}
    keys = list(dict.fromkeys((one.streams, one.server) for one in figures))
    summaries = []
    for streams, server in sorted(keys, key=lambda key: key[0]):
        ones = [one for one in figures if one.server == server and one.streams == streams]
        ratios = [one.tokens_per_s / base[one.round, streams] for one in ones if (one.round, streams) in base]
        groups = ones[0].by_group
        summaries.append(
            Summary(
                server,
                streams,
                len(ones),
                median(one.tokens_per_s for one in ones),
                median(one.decode_tokens_per_s for one in ones),
                median(one.first_token_s for one in ones),
                median(ratios) if ratios else 0.0,
                {group: median(one.by_group[group] for one in ones) for group in groups},
            )
        )
    return summaries
