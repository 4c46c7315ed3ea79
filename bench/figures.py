"""From answers to the figures of one measurement, and over rounds to medians and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.load import Answer


@dataclass(frozen=True, slots=True)
class Rates:
    """tokens_per_s: completion tokens over the wall time of the whole load, prompts included.
    decode_tokens_per_s: of a stream, from its first text to its end. first_token_s: median over answers.
    As a ratio each is a quotient of two servers' figures."""

    tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One server at one number of streams in one round.

    by_group: completion tokens over the summed time of a group's own answers.
    """

    server: str
    streams: int
    round: int
    answers: int
    completion_tokens: int
    rates: Rates
    by_group: dict[str, float]


def figures_of(server: str, streams: int, round_: int, answers: Sequence[Answer]) -> Figures:
    completion_tokens = sum(one.completion_tokens for one in answers)
    wall_s = max(one.ended_at for one in answers) - min(one.sent_at for one in answers)
    decoding = [one for one in answers if one.completion_tokens > 1 and one.ended_at > one.first_text_at]
    decoded = sum(one.completion_tokens - 1 for one in decoding)
    decode_s = sum(one.ended_at - one.first_text_at for one in decoding)
    groups = sorted({one.group for one in answers})
    rates = Rates(
        completion_tokens / wall_s,
        decoded / decode_s if decoding else 0.0,
        median(one.first_text_at - one.sent_at for one in answers),
    )
    by_group = {group: _rate([one for one in answers if one.group == group]) for group in groups}
    return Figures(server, streams, round_, len(answers), completion_tokens, rates, by_group)


def _rate(answers: Sequence[Answer]) -> float:
    return sum(one.completion_tokens for one in answers) / sum(one.ended_at - one.sent_at for one in answers)


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over rounds. ratios: to the baseline; None where it was not measured."""

    server: str
    streams: int
    rounds: int
    rates: Rates
    ratios: Rates | None
    by_group: dict[str, float]


def summarise(figures: Sequence[Figures], baseline: str) -> list[Summary]:
    """One row for every server and number of streams, in order of first appearance."""
    keys = list(dict.fromkeys((one.streams, one.server) for one in figures))
    summaries = []
    for streams, server in sorted(keys, key=lambda key: key[0]):
        ones = [one for one in figures if one.server == server and one.streams == streams]
        summaries.append(
            Summary(
                server,
                streams,
                len(ones),
                _medians([one.rates for one in ones]),
                ratios(figures, streams, server, baseline),
                {group: median(one.by_group[group] for one in ones) for group in ones[0].by_group},
            )
        )
    return summaries


def ratios(figures: Sequence[Figures], streams: int, server: str, other: str) -> Rates | None:
    """The server's figures over the other's; None if no round measured both.

    Quotients are taken within a round before the median, so that what slows the machine for one round does
    not count against whoever was measured in it.
    """
    at = {(one.round, one.server): one.rates for one in figures if one.streams == streams}
    rounds = sorted({round_ for round_, _ in at})
    quotients = [
        _quotient(at[round_, server], at[round_, other])
        for round_ in rounds
        if (round_, server) in at and (round_, other) in at
    ]
    return _medians(quotients) if quotients else None


def _quotient(one: Rates, other: Rates) -> Rates:
    def over(upper: float, lower: float) -> float:
        return upper / lower if lower else 0.0

    return Rates(
        over(one.tokens_per_s, other.tokens_per_s),
        over(one.decode_tokens_per_s, other.decode_tokens_per_s),
        over(one.first_token_s, other.first_token_s),
    )


def _medians(rates: Sequence[Rates]) -> Rates:
    return Rates(
        median(one.tokens_per_s for one in rates),
        median(one.decode_tokens_per_s for one in rates),
        median(one.first_token_s for one in rates),
    )
