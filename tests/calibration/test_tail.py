"""Extrapolation of known tails."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from grailnode.calibration.tail import MarginTail

LEVEL, DROP, MOST = 1e-9, 2.7, 100.0
TRIES = 20
FAR = np.array([0.5, 1.0, 2.0, 5.0, 10.0, 30.0])

Rate = Callable[[float], float]
"""Returns the probability of a margin beyond a value."""


def draws(draw: Callable[[Generator], np.ndarray]) -> list[MarginTail]:
    return [MarginTail(draw(np.random.default_rng(seed)), DROP, MOST) for seed in range(TRIES)]


def limits(draw: Callable[[Generator], np.ndarray]) -> list[float]:
    return [tail.reach(LEVEL) for tail in draws(draw)]


def exponential(x: float) -> float:
    """The integral of exp(-10 s) from x to x + 1."""
    return 0.1 * (math.exp(-10.0 * x) - math.exp(-10.0 * (x + 1.0)))


def half_normal(x: float) -> float:
    """The integral of erfc(z / sqrt 2), z = 100 s, from x on; what lies beyond x + 1 is far below every level."""
    z = 100.0 * x
    return 0.01 * (math.sqrt(2.0 / math.pi) * math.exp(-z * z / 2.0) - z * math.erfc(z / math.sqrt(2.0)))


def power(exponent: float) -> Rate:
    """The integral of (s / 0.01) ** -a from x to x + 1."""

    def rate(x: float) -> float:
        falling = x ** (1.0 - exponent) - (x + 1.0) ** (1.0 - exponent)
        return float(0.01**exponent / (exponent - 1.0) * falling)

    return rate


def reached(rate: Rate) -> float:
    """The smallest margin whose rate is at most the level."""
    low, high = 1e-3, MOST
    for _ in range(80):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rate(middle) > LEVEL else (low, middle)
    return high


def test_the_limit_covers_a_tail_closely() -> None:
    results = limits(lambda generator: generator.exponential(0.1, 100_000))
    assert sum(x >= reached(exponential) for x in results) >= TRIES - 2
    assert max(results) < 2.0 * reached(exponential)
    results = limits(lambda generator: np.abs(generator.normal(0.0, 0.01, 100_000)))
    assert sum(x >= reached(half_normal) for x in results) >= TRIES - 2
    assert max(results) < 2.0 * reached(half_normal)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_the_limit_covers_a_power_law(exponent: float) -> None:
    results = limits(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 11_000)))
    assert sum(x >= reached(power(exponent)) for x in results) >= TRIES - 2


@pytest.mark.parametrize("exponent", [2.5, 3.0, 4.0])
def test_rates_cover_a_power_law_at_every_far_margin(exponent: float) -> None:
    tails = draws(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 100_000)))
    true_rates = np.array([power(exponent)(x) for x in FAR])
    bounds = np.array([tail.rates(FAR) for tail in tails])
    assert (bounds >= true_rates).all(axis=1).sum() >= TRIES - 2
    assert (bounds <= 40.0 * true_rates).all()  # a bound that is far above the truth lets edited tokens pass
    assert (np.diff(bounds, axis=1) <= 0.0).all()


def test_rates_cover_the_margins_of_gumbel_noise() -> None:
    """Two sides draw from the same noise; the scores of one are shifted by heavy-tailed amounts."""
    generator = np.random.default_rng(0)
    tokens, vocabulary = 400_000, 6
    scores = generator.normal(0.0, 2.0, (tokens, vocabulary)) + generator.gumbel(size=(tokens, vocabulary))
    shifts = 0.02 * (1.0 + generator.pareto(3.0, tokens))
    shifted = scores.copy()
    shifted[np.arange(tokens), generator.integers(0, vocabulary, tokens)] += shifts
    margins = scores.max(axis=1) - np.take_along_axis(scores, shifted.argmax(axis=1)[:, None], axis=1)[:, 0]
    seen = [float((margins > x).mean()) for x in (0.1, 0.2, 0.4, 0.8)]
    assert seen[-1] > 0.0
    bounds = MarginTail(shifts[:20_000], DROP, MOST).rates(np.array([0.1, 0.2, 0.4, 0.8]))
    assert all(bound >= rate for bound, rate in zip(bounds, seen, strict=True))


def test_rates_are_not_claimed_where_the_tail_has_not_begun() -> None:
    (tail, *_) = draws(lambda generator: generator.exponential(0.1, 10_000))
    assert tail.rates(np.array([0.0, 0.1])).tolist() == [1.0, 1.0]


def test_rare_outliers_are_not_ignored() -> None:
    """One of a thousand values follows a power law; the limit then lies beyond 10 times the largest of the others."""

    def draw(generator: Generator) -> np.ndarray:
        values = generator.exponential(0.1, 100_000)
        outliers = generator.random(len(values)) < 1e-3
        values[outliers] = 0.5 * (1.0 + generator.pareto(3.0, outliers.sum()))
        return values

    assert sum(x > 12.0 for x in limits(draw)) >= TRIES - 4


def test_fewer_values_give_a_larger_limit() -> None:
    few = limits(lambda generator: generator.exponential(0.1, 300))
    many = limits(lambda generator: generator.exponential(0.1, 30_000))
    assert sorted(few)[TRIES // 2] > 1.2 * sorted(many)[TRIES // 2]


def test_equal_values_are_not_extrapolated() -> None:
    tail = MarginTail(np.full(1000, 0.25), DROP, MOST)
    assert tail.reach(LEVEL) == 0.25
    assert tail.rates(np.array([0.25, 1.0])).tolist() == [0.0, 0.0]
