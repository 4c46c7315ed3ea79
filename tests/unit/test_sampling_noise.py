"""The noise: golden values, one value per (seed, position, id) however it is asked for, its distribution."""

import numpy as np
import pytest

from common.sampling.noise import BLOCK, block_gumbel, gumbel

GOLDEN = [
    # seed, position, ids, noise
    (0, 0, [0, 1, 63, 64], [3.501418988272985, -0.3741617883477056, -1.1584576680108878, 0.5859426750217773]),
    (42, 17, [0, 5, 49151], [-0.8856829117023953, -0.4198773146511811, 1.3924588414118426]),
    (
        18446744073709551615,
        8191,
        [151935, 2, 2],
        [1.6616485597162713, 0.7368094735193192, 0.7368094735193192],
    ),
]


@pytest.mark.parametrize(("seed", "position", "ids", "expected"), GOLDEN)
def test_the_noise_never_changes(seed: int, position: int, ids: list[int], expected: list[float]) -> None:
    np.testing.assert_allclose(gumbel(seed, position, np.array(ids)), expected, rtol=1e-12)


def test_an_ids_noise_does_not_depend_on_the_ids_beside_it() -> None:
    ids = np.arange(50_001)
    whole = gumbel(7, 123, ids)
    order = np.random.default_rng(0).permutation(len(ids))
    assert (gumbel(7, 123, ids[order]) == whole[order]).all()
    for size in (1, 2, 3, 5, 7, 9, 63, 65, 1000):
        for start in (0, 1, 62, 64, 49_001):
            assert (gumbel(7, 123, ids[start : start + size]) == whole[start : start + size]).all()


def test_block_noise_is_the_largest_of_the_block() -> None:
    blocks = 500
    for position in range(5):
        noise = gumbel(11, position, np.arange(blocks * BLOCK)).reshape(blocks, BLOCK)
        np.testing.assert_allclose(noise.max(axis=1), block_gumbel(11, position, blocks), atol=1e-12)


def test_seed_position_and_id_each_change_the_noise() -> None:
    base = gumbel(1, 1, np.arange(100))
    assert not (gumbel(2, 1, np.arange(100)) == base).any()
    assert not (gumbel(1, 2, np.arange(100)) == base).any()
    assert not (gumbel(1, 1, np.arange(1, 101)) == base).any()
    assert len(np.unique(base)) == 100


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    ids = np.arange(10)
    assert (gumbel(-1, 5, ids) == gumbel(2**64 - 1, 5, ids)).all()


def test_the_noise_is_standard_gumbel() -> None:
    """Kolmogorov-Smirnov: sup |F_n − F| · √n exceeds 1.95 once in a thousand times."""
    for noise in (
        gumbel(3, 9, np.arange(200_000)),
        np.concatenate([gumbel(3, position, np.array([17])) for position in range(20_000)]),
        np.concatenate([gumbel(seed, 4, np.array([40_000])) for seed in range(20_000)]),
    ):
        expected = np.exp(-np.exp(-np.sort(noise)))
        steps = np.arange(len(noise)) / len(noise)
        distance = np.abs(expected - steps).max() + 1 / len(noise)
        assert distance * np.sqrt(len(noise)) < 1.95


def test_ids_and_positions_are_independent_of_each_other() -> None:
    """Pairs of uniforms on a 16 × 16 grid: chi-square, 255 degrees of freedom, one in a thousand at 331."""
    ids = np.array([0, 1, 3, 60, 64, 127, 5, 5 + BLOCK])
    noise = np.stack([gumbel(21, position, ids) for position in range(25_664)])
    cells = (np.exp(-np.exp(-noise)) * 16).astype(int)
    pairs = [(cells[:25_600, one], cells[:25_600, one + 1]) for one in range(0, len(ids), 2)]
    pairs += [(cells[:25_600, 0], cells[lag : 25_600 + lag, 0]) for lag in (1, 64)]
    for first, second in pairs:
        counts = np.bincount(first * 16 + second, minlength=256)
        assert ((counts - 100.0) ** 2 / 100.0).sum() < 331
