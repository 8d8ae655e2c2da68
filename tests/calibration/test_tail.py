"""Extrapolation of known tails."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from grailnode.calibration.tail import reach

LEVEL, DROP, MOST = 1e-9, 2.7, 100.0
TRIES = 20


def limits(draw: Callable[[Generator], np.ndarray]) -> list[float]:
    return [reach(draw(np.random.default_rng(seed)), LEVEL, DROP, MOST) for seed in range(TRIES)]


def test_the_limit_covers_a_tail_closely() -> None:
    """0.1 * Exp: x * exp(-10 x) = 1e-9 at x = 2.15; |N(0, 0.01)|: 2 x * (1 - Phi(100 x)) = 1e-9 at x = 0.053."""
    results = limits(lambda generator: generator.exponential(0.1, 100_000))
    assert sum(x >= 2.15 for x in results) >= TRIES - 2
    assert max(results) < 4.0
    results = limits(lambda generator: np.abs(generator.normal(0.0, 0.01, 100_000)))
    assert sum(x >= 0.053 for x in results) >= TRIES - 2
    assert max(results) < 0.1


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_the_limit_covers_a_power_law(exponent: float) -> None:
    """x * (x / 0.01) ** -a = 1e-9 at x = (1e9 * 0.01 ** a) ** (1 / (a - 1))."""
    expected_limit = min(MOST, (1e9 * 0.01**exponent) ** (1.0 / (exponent - 1.0)))
    results = limits(lambda generator: 0.01 * (1.0 + generator.pareto(exponent, 11_000)))
    assert sum(x >= expected_limit for x in results) >= TRIES - 2


def test_rare_outliers_are_not_ignored() -> None:
    """One of a thousand values follows a power law, whose tail exceeds all bounds."""

    def draw(generator: Generator) -> np.ndarray:
        values = generator.exponential(0.1, 100_000)
        outliers = generator.random(len(values)) < 1e-3
        values[outliers] = 0.5 * (1.0 + generator.pareto(3.0, outliers.sum()))
        return values

    assert sum(x > 20.0 for x in limits(draw)) >= TRIES - 4


def test_fewer_values_give_a_larger_limit() -> None:
    few = limits(lambda generator: generator.exponential(0.1, 300))
    many = limits(lambda generator: generator.exponential(0.1, 30_000))
    assert sorted(few)[TRIES // 2] > 1.2 * sorted(many)[TRIES // 2]


def test_equal_values_are_not_extrapolated() -> None:
    assert reach(np.full(1000, 0.25), LEVEL, DROP, MOST) == 0.25
