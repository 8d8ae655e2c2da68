"""How far the honest noise reaches that nobody has seen yet: a tail, continued beyond the largest values that were
measured.

Two tails are fitted to the largest hundredth, by the logarithm t of a value over the least of these: one that falls as
a power of the value (Hill 1975), with H(t) = t / w, and one that falls as an exponential of a power (Weibull; Girard
2004), with H(t) = L (exp(t / w) - 1), L = ln(n / k); of n values k exceed the border, and H = -ln P(beyond | beyond the
border). Noise of rounding has a tail of the second kind, outliers of a routing or an overflow may have one of the
first. Every tail counts that what was measured does not speak against, and the one that reaches furthest decides.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np

_LARGEST: Final = 100  # one of so many values makes the tail,
_ENOUGH: Final = 150  # or so many values do
_MOST: Final = 20  # where they are not more than one of so many,
_LEAST: Final = 10  # and at least so many
_WEIGHTS: Final = np.geomspace(0.02, 20.0, 500)
_STEPS: Final = 4000
_MOST_EXPONENT: Final = 700.0  # of a float64

Tail = Callable[[np.ndarray, float, float], tuple[np.ndarray, np.ndarray]]
"""H and ln H' of logarithms t, for a weight w and L."""


def _power(t: np.ndarray, weight: float, _: float) -> tuple[np.ndarray, np.ndarray]:
    return t / weight, np.full_like(t, -math.log(weight))


def _weibull(t: np.ndarray, weight: float, logarithm: float) -> tuple[np.ndarray, np.ndarray]:
    grown = np.minimum(t / weight, _MOST_EXPONENT)
    return logarithm * np.expm1(grown), math.log(logarithm / weight) + grown


def reach(values: np.ndarray, level: float, drop: float, most: float) -> float:
    """The least x from which on x * P(value > x) stays below a level; `most` where that is beyond it.

    Args:
        values: float64 [n], positive.
        drop: of the log-likelihood: tails that are less likely than the likeliest by no more than that count.
    """
    falling = np.sort(values)[::-1]
    k = max(len(falling) // _LARGEST, min(_ENOUGH, len(falling) // _MOST), _LEAST)
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
    for tail, weight in (found for found, value in tails.items() if value >= least):
        logarithms = steps + math.log(border * share / level) - tail(steps, weight, logarithm)[0]  # of x * P / level
        furthest = max(furthest, int(np.flatnonzero(logarithms >= 0.0).max(initial=-1)) + 1)
    return most if furthest >= _STEPS else border * math.exp(steps[furthest])
