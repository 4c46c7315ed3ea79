"""The sampler against its naive definition, and against the distribution that it claims to sample."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.sampling.noise import gumbel
from common.sampling.params import SamplingParams
from common.sampling.sampler import sample

Row = npt.NDArray[np.float32]

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
]


def kept_by_definition(logits: Row, params: SamplingParams) -> list[int]:
    """The filters as the words have it: sort everything, then cut."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    top = float(logits[order[0]])
    weight = np.exp((logits.astype(np.float64) - top) / params.temperature)
    total = weight.sum()
    if 0 < params.top_k < len(logits):
        order = order[: params.top_k]
        total = np.cumsum(weight[order])[-1]
    if params.top_p < 1.0:
        mass = list(itertools.accumulate(weight[order]))
        enough = [index for index, reached in enumerate(mass) if reached >= params.top_p * total]
        order = order[: enough[0] + 1] if enough else order
    return [order[0]] + [token for token in order[1:] if weight[token] >= params.min_p]


def sample_by_definition(logits: Row, params: SamplingParams, position: int) -> int:
    kept = np.array(sorted(kept_by_definition(logits, params)))
    scaled = (logits[kept].astype(np.float64) - float(logits.max())) / params.temperature
    return int(kept[np.argmax(scaled + gumbel(params.seed, position, kept))])


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in ten thousand times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def peaked_row(vocab: int, seed: int) -> Row:
    generator = np.random.default_rng(seed)
    row = generator.standard_normal(vocab) * 3
    row[generator.integers(0, vocab, 12)] += generator.uniform(6, 14, 12)
    return row.astype(np.float32)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Rows with ties, few distinct values, forbidden tokens and lengths around the block size."""
    vocab = draw(st.sampled_from([1, 2, 3, 63, 64, 65, 130, 300]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    row = generator.standard_normal(vocab) * spread
    if draw(st.booleans()):
        row = np.round(row)
    row[generator.random(vocab) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    row[generator.integers(vocab)] = draw(st.sampled_from([0.0, -0.0, 5.0]))
    return row.astype(np.float32)


filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-3, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 64, 200, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.7, 0.95, 1 - 1e-12, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(rows(), filters, st.integers(0, 100_000))
@example(np.zeros(300, np.float32), SamplingParams(1.0, top_p=0.5, seed=1), 3)
def test_the_fast_way_equals_the_definition(logits: Row, params: SamplingParams, position: int) -> None:
    assert sample(logits, params, position) == sample_by_definition(logits, params, position)


@pytest.mark.parametrize("params", PARAMS)
def test_the_fast_way_equals_the_definition_on_a_large_vocabulary(params: SamplingParams) -> None:
    for position, vocab in enumerate((49_152, 151_936, 50_001)):
        row = peaked_row(vocab, position)
        assert sample(row, params, position) == sample_by_definition(row, params, position)
        flat = np.round(row / 8)
        assert sample(flat, params, position) == sample_by_definition(flat, params, position)


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_follow_the_filtered_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws, half over positions, half over seeds; rare tokens are pooled."""
    row = (np.random.default_rng(5).standard_normal(150) * 2).astype(np.float32)
    kept = kept_by_definition(row, params)
    weight = np.exp((row[kept].astype(np.float64) - row.max()) / params.temperature)
    expected = np.zeros(len(row))
    expected[kept] = weight / weight.sum()
    draws = 20_000
    seeded = [
        SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, s) for s in range(draws)
    ]
    tokens = [sample(row, seeded[0], position) for position in range(draws // 2)]
    tokens += [sample(row, seeded[seed], 77) for seed in range(1, draws // 2 + 1)]
    counts = np.bincount(tokens, minlength=len(row))
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*(expected[common] * draws), expected[~common].sum() * draws]
    if wanted[-1] < 5:
        observed[-2:], wanted[-2:] = [sum(observed[-2:])], [sum(wanted[-2:])]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in zip(observed, wanted, strict=True))
    assert statistic < chi_square_limit(len(wanted) - 1)


def test_sampling_repeats_exactly_and_does_not_read_its_neighbours() -> None:
    batch = np.stack([peaked_row(1000, seed) for seed in range(8)])
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=99)
    together = [sample(row, params, 7) for row in batch]
    assert together == [sample(row.copy(), params, 7) for row in batch[::-1]][::-1]
    assert len({sample(batch[0], params, position) for position in range(200)}) > 1


def test_temperature_zero_takes_the_lowest_of_equal_largest_logits() -> None:
    row = np.zeros(200, np.float32)
    row[[150, 70, 90]] = 4.0
    assert sample(row, SamplingParams(), 5) == 70
    row[30] = -0.0
    row[[150, 70, 90]] = -1.0
    assert sample(row, SamplingParams(), 5) == 0


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    row = np.full(1000, -5.0, np.float32)
    row[[900, 300, 500, 700]] = 1.0
    row[999] = 2.0
    for params, kept in (
        (SamplingParams(1.0, top_k=3), {999, 300, 500}),
        (SamplingParams(1.0, top_p=0.4), {999, 300}),
        (SamplingParams(1.0, min_p=math.exp(-1.0)), {999, 300, 500, 700, 900}),
    ):
        assert {sample(row, params, position) for position in range(400)} == kept


def test_top_p_stops_where_the_mass_is_reached_exactly() -> None:
    for vocab, kept in ((4, {0, 1}), (100, set(range(50)))):
        row = np.zeros(vocab, np.float32)
        params = SamplingParams(1.0, top_p=0.5)
        assert {sample(row, params, position) for position in range(1000)} == kept


def test_a_forbidden_token_is_never_sampled() -> None:
    row = np.full(500, -np.inf, np.float32)
    row[[3, 499]] = 0.0
    for params in PARAMS:
        assert {sample(row, params, position) for position in range(60)} <= {3, 499}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_the_argmax(temperature: float) -> None:
    row = peaked_row(5000, 3)
    for params in (SamplingParams(temperature), SamplingParams(temperature, 40, 0.9, 0.1)):
        assert sample(row, params, 4) == row.argmax()


@pytest.mark.parametrize(
    ("value", "words"), [(np.nan, "position 12 are not finite: nan"), (np.inf, "inf at token 321")]
)
def test_a_row_that_is_not_finite_is_refused_by_position(value: float, words: str) -> None:
    row = peaked_row(1000, 0)
    row[321] = value
    for params in (SamplingParams(), *PARAMS):
        with pytest.raises(ValueError, match=words):
            sample(row, params, 12)


def test_a_row_without_an_allowed_token_is_refused() -> None:
    with pytest.raises(ValueError, match="position 9 allow no token"):
        sample(np.full(100, -np.inf, np.float32), SamplingParams(1.0), 9)
