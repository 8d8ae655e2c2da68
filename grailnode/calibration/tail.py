"""Extrapolates the tail of the honest noise beyond the largest values that were measured.

Two kinds of tails are fitted to the largest hundredth of the values, in the logarithm t of a value over the smallest of
these, the border: one that falls as a power of the value (Hill 1975), with H(t) = t / w, and one that falls as an
exponential of a power (Weibull; Girard 2004), with H(t) = L (exp(t / w) - 1), L = ln(n / k). Here k of n values exceed
the border, and H = -ln P(value > x | value > border). Rounding noise has a tail of the second kind; outliers of a
routing or an overflow may have one of the first. All tails that the measurements do not contradict count, and the
furthest of them decides.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np

# The tail has n / _FRACTION of n values; if that is less than _ENOUGH, as many as _ENOUGH but not more than
# n / _LARGEST_FRACTION; in any case at least _LEAST.
_FRACTION: Final = 100
_ENOUGH: Final = 150
_LARGEST_FRACTION: Final = 20
_LEAST: Final = 10
_WEIGHTS: Final = np.geomspace(0.02, 20.0, 500)
_STEPS: Final = 4000
_MOST_EXPONENT: Final = 700.0  # exp of it fits into a float64

Tail = Callable[[np.ndarray, float, float], tuple[np.ndarray, np.ndarray]]
"""Returns H(t) and ln H'(t) for t, w and L."""


def _power(t: np.ndarray, weight: float, _: float) -> tuple[np.ndarray, np.ndarray]:
    return t / weight, np.full_like(t, -math.log(weight))


def _weibull(t: np.ndarray, weight: float, logarithm: float) -> tuple[np.ndarray, np.ndarray]:
    exponent = np.minimum(t / weight, _MOST_EXPONENT)
    return logarithm * np.expm1(exponent), math.log(logarithm / weight) + exponent


def reach(values: np.ndarray, level: float, drop: float, most: float) -> float:
    """Return the smallest x beyond which x * P(value > x) stays below a level, at most `most`.

    Args:
        values: float64 [n], positive.
        drop: tails count whose log-likelihood is below the largest one by no more than this, in nats.
    """
    falling = np.sort(values)[::-1]
    k = max(len(falling) // _FRACTION, min(_ENOUGH, len(falling) // _LARGEST_FRACTION), _LEAST)
    k = min(k, len(falling) - 1)
    border, share = float(falling[k]), k / len(falling)
    above, logarithm = np.log(falling[:k] / border), -math.log(share)
    if above[0] <= 0.0:
        return border

    def likelihood(tail: Tail, weight: float) -> float:
        hazard, log_slope = tail(above, weight, logarithm)
        return float((log_slope - hazard).sum())

    tails = {(tail, weight): likelihood(tail, weight) for tail in (_power, _weibull) for weight in _WEIGHTS.tolist()}
    least = max(tails.values()) - drop
    steps = np.linspace(0.0, max(0.0, math.log(most / border)), _STEPS)
    furthest = 0
    for tail, weight in (candidate for candidate, value in tails.items() if value >= least):
        logarithms = steps + math.log(border * share / level) - tail(steps, weight, logarithm)[0]  # of x * P / level
        furthest = max(furthest, int(np.flatnonzero(logarithms >= 0.0).max(initial=-1)) + 1)
    return most if furthest >= _STEPS else border * math.exp(steps[furthest])
