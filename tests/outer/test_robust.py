"""Which contributions count, and with which factors."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.outer.robust import PLAIN_MEAN, RobustSettings, Weighting, weigh

Vector = NDArray[np.float64]
SIZE = 4000
ROBUST = RobustSettings()


def honest(seed: int, count: int = 4, agreement: float = 0.3) -> list[Vector]:
    """Return updates of about the same length whose cosines with each other are about `agreement`."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal(SIZE)
    return [np.sqrt(agreement) * shared + np.sqrt(1 - agreement) * random.standard_normal(SIZE) for _ in range(count)]


def result(vectors: list[Vector], settings: RobustSettings = ROBUST) -> Weighting:
    matrix = np.array(vectors)
    return weigh(matrix @ matrix.T, settings)


def noise(seed: int) -> Vector:
    return np.random.default_rng(1000 + seed).standard_normal(SIZE)


def one_tensor(own: Vector) -> Vector:
    mass = np.zeros(SIZE)
    mass[:40] = np.linalg.norm(own) / np.sqrt(40)
    return mass


ATTACKS: dict[str, Callable[[Vector, int], Vector]] = {
    "sign flip": lambda own, _: -own,
    "times -10": lambda own, _: -10 * own,
    "noise": lambda _, seed: noise(seed),
    "noise times 100": lambda _, seed: 100 * noise(seed),
    "one tensor": lambda own, _: one_tensor(own),
}


@pytest.mark.parametrize("agreement", [0.1, 0.3, 0.9])
def test_honest_sites_all_count(agreement: float) -> None:
    for seed in range(20):
        factors = result(honest(seed, agreement=agreement)).factors
        assert min(factors) > 0.9


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_poisoned_site_in_four_is_refused(attack: str) -> None:
    for seed in range(20):
        vectors = honest(seed)
        vectors[2] = ATTACKS[attack](vectors[2], seed)
        factors = result(vectors).factors
        assert factors[2] == 0
        assert min(factors[:2] + factors[3:]) > 0.9


def test_the_plain_mean_refuses_nobody() -> None:
    vectors = honest(1)
    vectors[2] *= -10
    assert result(vectors, PLAIN_MEAN).factors == (1.0,) * 4


def test_a_long_contribution_is_scaled_to_the_median_length() -> None:
    vectors = honest(2)
    vectors[1] *= 50
    factors = result(vectors).factors
    lengths = sorted(factor * float(np.linalg.norm(vector)) for factor, vector in zip(factors, vectors, strict=True))
    assert lengths[-1] == pytest.approx(lengths[1], rel=0.02)


def test_no_site_has_more_than_its_share() -> None:
    vectors = [0.01 * vector for vector in honest(3, 4)]
    vectors[0] *= 100
    factors = result(vectors, RobustSettings(clips=False, agreement=None, share=0.4)).factors
    lengths = [factor * float(np.linalg.norm(vector)) for factor, vector in zip(factors, vectors, strict=True)]
    assert lengths[0] / sum(lengths) == pytest.approx(0.4)
    assert factors[1:] == (1.0,) * 3
    two = [10 * vectors[1], vectors[1]]
    assert result(two, RobustSettings(clips=False, agreement=None, share=0.4)).factors == (1.0, 1.0)


def test_fewer_than_half_are_removed() -> None:
    for count in range(1, 8):
        vectors = [noise(seed) for seed in range(count)]
        factors = result(vectors, RobustSettings(agreement=1.0)).factors
        assert sum(factor == 0 for factor in factors) <= max(0, (count - 1) // 2)


def test_two_sites_and_updates_of_zero() -> None:
    own = noise(1)
    assert result([own, -own]).factors == (1.0, 1.0)
    assert all(np.isfinite(result([np.zeros(SIZE)] * 3).factors))
    assert weigh(np.zeros((0, 0)), ROBUST).factors == ()
