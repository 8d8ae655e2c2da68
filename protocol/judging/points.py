"""Points: tests of how far statistics lie, and not only of how many lie beyond one threshold.

A position has the points of the last step of its row of thresholds that its statistic lies beyond; they grow from step
to step. Honest noise lies beyond step j with a probability of at most p_j, which `grailnode calibrate` bounds. So
whatever the distribution within these bounds, the points X of an honest position have

    E[w^X] <= M(w) = 1 + sum over j of p_j (w^x_j - w^x_(j-1))          for each w >= 1,

where x_j are the points of step j and x_0 = 0, since w^X grows with the statistic. Points are integers, whose sums are
the same on every machine.
"""

import functools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from protocol.proof import Step

POINTS_OF_DOUBLING: Final = 4
"""Points by which the steps of a copy differ whose odds against honest work differ by a factor of two."""

LOG_WEIGHTS: Final = np.arange(1, 33) * (math.log(2.0) / 16.0)
"""ln w for the weights 2^(k/16) of a point, k = 1..32: float64 [32]. With k = 4 the weights are the odds of the copy by
which the points were chosen; the others are for cheats that differ less or more.
"""


def count_points(values: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """Return the points of each value: int64 of the shape of `values`. NaN lies beyond all steps."""
    reached = np.searchsorted([step.beyond for step in steps], values, side="left")
    points: np.ndarray = np.array([0, *(step.points for step in steps)])[reached]
    return points


def mean_bound(steps: Sequence[Step]) -> float:
    """Return the largest mean of an honest position's points."""
    before = [0, *(step.points for step in steps)]
    return sum(step.rate * (step.points - points) for step, points in zip(steps, before, strict=False))


@functools.lru_cache(maxsize=1024)
def _log_growth(steps: tuple[Step, ...]) -> np.ndarray:
    """Return ln M(w) for each weight: float64 [32]."""
    powers = np.exp(LOG_WEIGHTS[:, None] * np.array([0, *(step.points for step in steps)]))
    growth: np.ndarray = np.log1p(np.diff(powers, axis=1) @ np.array([step.rate for step in steps]))
    return growth


def log_factors(points: int, trials: int, steps: tuple[Step, ...]) -> np.ndarray:
    """Return ln(w^points / M(w)^trials) for each weight: float64 [32]. The expectation of w^points / M(w)^trials is at
    most 1 under honest work.
    """
    factors: np.ndarray = points * LOG_WEIGHTS - trials * _log_growth(steps)
    return factors


def log_tail(points: int, trials: int, steps: tuple[Step, ...]) -> float:
    """Return the logarithm of a bound on the probability that honest work has at least so many points, at most 0.

    It is Chernoff's bound, M(w)^trials / w^points for the best weight w: it falls with the points whatever the weight,
    so the best one may be taken after they were seen.
    """
    return min(0.0, -float(log_factors(points, trials, steps).max()))
