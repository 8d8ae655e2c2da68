"""How far tails that are known really reach."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator

from grailnode.calibration.tail import reach

LEVEL, DROP, MOST = 1e-9, 2.7, 100.0
TRIES = 20


def reached(draw: Callable[[Generator], np.ndarray]) -> list[float]:
    return [reach(draw(np.random.default_rng(seed)), LEVEL, DROP, MOST) for seed in range(TRIES)]


def test_a_tail_is_covered_and_not_by_much() -> None:
    """0.1 * Exp: x * exp(-10 x) = 1e-9 at x = 2.15; |N(0, 0.01)|: 2 x * (1 - Phi(100 x)) = 1e-9 at x = 0.053."""
    found = reached(lambda chance: chance.exponential(0.1, 100_000))
    assert sum(x >= 2.15 for x in found) >= TRIES - 2
    assert max(found) < 4.0
    found = reached(lambda chance: np.abs(chance.normal(0.0, 0.01, 100_000)))
    assert sum(x >= 0.053 for x in found) >= TRIES - 2
    assert max(found) < 0.1


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_a_power_is_not_taken_for_less(exponent: float) -> None:
    """x * (x / 0.01) ** -a = 1e-9 at x = (1e9 * 0.01 ** a) ** (1 / (a - 1))."""
    due = min(MOST, (1e9 * 0.01**exponent) ** (1.0 / (exponent - 1.0)))
    found = reached(lambda chance: 0.01 * (1.0 + chance.pareto(exponent, 11_000)))
    assert sum(x >= due for x in found) >= TRIES - 2


def test_rare_outliers_are_not_smoothed_over() -> None:
    """One value of a thousand is of another kind, whose power reaches beyond all bounds."""

    def drawn(chance: Generator) -> np.ndarray:
        values = chance.exponential(0.1, 100_000)
        outliers = chance.random(len(values)) < 1e-3
        values[outliers] = 0.5 * (1.0 + chance.pareto(3.0, outliers.sum()))
        return values

    assert sum(x > 20.0 for x in reached(drawn)) >= TRIES - 4


def test_few_values_reach_further_than_many() -> None:
    few = reached(lambda chance: chance.exponential(0.1, 300))
    many = reached(lambda chance: chance.exponential(0.1, 30_000))
    assert sorted(few)[TRIES // 2] > 1.2 * sorted(many)[TRIES // 2]


def test_values_that_are_all_alike_reach_no_further() -> None:
    assert reach(np.full(1000, 0.25), LEVEL, DROP, MOST) == 0.25
