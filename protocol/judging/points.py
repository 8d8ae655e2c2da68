"""Points: tests of how far statistics lie, and not only of how many lie beyond one threshold.

A position has the points of the last step of its row of thresholds that its statistic lies beyond; they grow from step
to step. Honest noise lies beyond step j with a probability of at most p_j, which `grailnode calibrate` bounds. Points
grow with the statistic, so whatever the distribution within these bounds, no sum of points is more often reached than
by the distribution that has the full rates p_j. Of groups and windows, `log_tail` is the probability of their sum under
that distribution. Of histories, whose windows may have several rows, the expectations are multiplied,

    E[w^X] <= M(w) = 1 + sum over j of p_j (w^x_j - w^x_(j-1))          for each w >= 1,

where X are the points of an honest position, x_j those of step j, and x_0 = 0. Points are integers, whose sums are the
same on every machine.
"""

import functools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from protocol.proof import Step

POINTS_OF_DOUBLING: Final = 4
"""Points by which the steps of a copy differ whose odds against honest work differ by a factor of two."""

_MOST_LOG_WEIGHT: Final = 40.0
_BISECTIONS: Final = 60
_LARGEST_SIZE: Final = 1 << 18
_FOURIER_ERROR: Final = 1e-12
"""Above the error of a transform of probabilities, in float64."""

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


@functools.lru_cache(maxsize=4096)
def log_tail(points: int, trials: int, steps: tuple[Step, ...]) -> float:
    """Return the logarithm of the largest probability that honest work has at least so many points.

    Points grow with the statistic, so among all honest distributions the one that has the full rates has the most of
    them: the sum of its independent positions is at least `points` with the largest probability. That sum is computed
    for the distribution w^X / E[w^X], with the weight w for which its mean is `points` (exponential tilting, Esscher
    1932): its tail is then no small difference of large numbers, and is exact to some 1e-10 of itself. Where the sum
    has too many values, the result is Chernoff's bound, E[w^X]^trials / w^points.

    Returns:
        At most 0; -inf for more points than so many positions can have.
    """
    values = np.array([0, *(step.points for step in steps)])
    if points > trials * int(values[-1]):
        return -math.inf
    rates = np.array([1.0, *(step.rate for step in steps), 0.0])
    probabilities = -np.diff(rates)
    log_weight = _log_weight(points / max(trials, 1), values, probabilities)
    if log_weight == 0.0:
        return 0.0  # no more points than the mean
    tilted = probabilities * np.exp(log_weight * (values - values[-1]))
    bound = trials * (math.log(tilted.sum()) + log_weight * float(values[-1])) - log_weight * points
    size = _fourier_size(points, trials, int(values[-1]))
    if size > _LARGEST_SIZE:
        return min(0.0, bound)
    single = np.bincount(values, tilted / tilted.sum(), size)
    sums = np.fft.irfft(np.fft.rfft(single) ** trials, size)[points:].clip(min=0.0)
    share = float(sums @ np.exp(-log_weight * np.arange(len(sums))))
    return min(0.0, bound + math.log(min(1.0, share + _FOURIER_ERROR)))


def _log_weight(mean: float, values: np.ndarray, probabilities: np.ndarray) -> float:
    """Return ln w, from 0 to _MOST_LOG_WEIGHT, for which w^X / E[w^X] gives points this mean: 0 if they have it."""

    def tilted_mean(log_weight: float) -> float:
        tilted = probabilities * np.exp(log_weight * (values - values[-1]))
        return float(tilted @ values / tilted.sum())

    if tilted_mean(0.0) >= mean:
        return 0.0
    low, high = 0.0, _MOST_LOG_WEIGHT
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tilted_mean(middle) < mean else (low, middle)
    return low


def _fourier_size(points: int, trials: int, most: int) -> int:
    """Return how many values of the sum a transform needs: what lies beyond them, more than 16 standard deviations
    above the mean, is lost.
    """
    return 1 << (min(trials * most, 2 * points + 64 * most)).bit_length()
