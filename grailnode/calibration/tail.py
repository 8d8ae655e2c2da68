"""Bounds on how often honest noise reaches a step: by counting, and by extrapolation beyond what was measured.

A margin beyond x needs two scores that the two sides shift against each other by some S > x, and that differ by less
than S - x on the miner's side. With Gumbel noise the best score, of a token of probability p, is less than d above all
others with a probability of about (1 - p) d, and never more than d. So a margin beyond x has a probability of at most
the mean of 1 - p times the integral of P(S > s) over s from x to x + 1, where each position counts for its 1 - p.

Two kinds of tails are fitted to the largest hundredth of the shifts, in the logarithm t of a shift over the smallest of
these, the border: one that falls as a power of the shift (Hill 1975), with H(t) = t / w, and one that falls as an
exponential of a power (Weibull; Girard 2004), with H(t) = L (exp(t / w) - 1), L = ln(n / k). Here k of n values exceed
the border, and H = -ln P(S > s | S > border). Rounding noise has a tail of the second kind; outliers of a routing or an
overflow, and noise whose size differs much from position to position, have one of the first. All tails that the
measurements do not contradict count, and at each margin the one that allows most decides.
"""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

# The tail has n / _FRACTION of n values; if that is less than _ENOUGH, as many as _ENOUGH but not more than
# n / _LARGEST_FRACTION; in any case at least _LEAST.
_FRACTION: Final = 100
_ENOUGH: Final = 150
_LARGEST_FRACTION: Final = 20
_LEAST: Final = 10
_WEIGHTS: Final = np.geomspace(0.02, 20.0, 500)
_STEPS: Final = 4000
_MOST_EXPONENT: Final = 700.0  # exp of it fits into a float64

_Tail = Callable[[np.ndarray, float, float], tuple[np.ndarray, np.ndarray]]
"""Returns H(t) and ln H'(t) for t, w and L."""


def tail_rates(values: np.ndarray, beyond: np.ndarray, drop: float, most: float) -> np.ndarray:
    """Return upper bounds on the probability of a margin beyond each of some, from the shifts of a pair, which hold for
    each plausible tail: float64 [M], 1 where the shifts have no tail yet.

    The shifts are float64 [n], positive, in units of logits / temperature. Tails are plausible whose log-likelihood is
    below the largest one by no more than `drop` nats. `most` is the largest margin that is asked for.
    """
    falling = np.sort(values)[::-1]
    k = max(len(falling) // _FRACTION, min(_ENOUGH, len(falling) // _LARGEST_FRACTION), _LEAST)
    k = min(k, len(falling) - 1)
    border = float(falling[k])
    grid = np.geomspace(border, max(most, border) + 1.0, _STEPS)
    above = np.log(falling[:k] / border)
    rates = _largest_rates(grid, above, k / len(falling), drop) if above[0] > 0.0 else np.zeros(_STEPS)
    places = np.searchsorted(grid, beyond, side="right") - 1
    result: np.ndarray = np.where(places < 0, 1.0, rates[places.clip(min=0)])
    return result


def _largest_rates(grid: np.ndarray, above: np.ndarray, share: float, drop: float) -> np.ndarray:
    """Return the largest probability that a plausible tail gives to margins beyond each point of a grid, which ascends
    by equal factors from the border on: float64 [STEPS]. `above` are the logarithms of the largest k values over the
    border, falling: float64 [k]; `share` is k of n.
    """
    logarithm, logs = -math.log(share), np.log(grid / grid[0])
    widths = np.diff(grid, append=grid[-1])
    ends = np.searchsorted(grid, grid + 1.0).clip(max=len(grid) - 1)
    tails = [(tail, weight) for tail in (_power, _weibull) for weight in _WEIGHTS.tolist()]
    likelihoods = [float((slope - hazard).sum()) for hazard, slope in (t(above, w, logarithm) for t, w in tails)]
    rates = np.zeros(len(grid))
    for (tail, weight), likelihood in zip(tails, likelihoods, strict=True):
        if likelihood >= max(likelihoods) - drop:
            beyond = share * np.exp(-tail(logs, weight, logarithm)[0])
            # P(S > s) falls, so the sum of its values at the beginnings is above the integral.
            beyond_end = np.append(np.cumsum((beyond * widths)[::-1])[::-1], 0.0)
            rates = np.maximum(rates, beyond_end[:-1] - beyond_end[ends])
    return rates


def _power(t: np.ndarray, weight: float, _: float) -> tuple[np.ndarray, np.ndarray]:
    return t / weight, np.full_like(t, -math.log(weight))


def _weibull(t: np.ndarray, weight: float, logarithm: float) -> tuple[np.ndarray, np.ndarray]:
    exponent = np.minimum(t / weight, _MOST_EXPONENT)
    return logarithm * np.expm1(exponent), math.log(logarithm / weight) + exponent


def rate_bounds(events: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Compute upper bounds on rates after so many events in `trials` independent trials: float64 [C] from integer [C].

    Each true rate lies below its bound with at least the given confidence. The bound is that of a Poisson distribution
    (Garwood 1936), which has more small counts than the binomial one of the same mean (Anderson and Samuels 1967).
    """
    if trials <= 0 or not 0.0 < confidence < 1.0:
        raise ValueError("a bound needs trials and a confidence between 0 and 1")
    counts = torch.from_numpy(np.asarray(events, dtype=np.float64))
    low, high = torch.zeros_like(counts), torch.full_like(counts, float(trials))
    for _ in range(100):
        middle = (low + high) / 2
        too_low = torch.special.gammaincc(counts + 1.0, middle) > 1.0 - confidence  # P(X <= events) at this mean
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return high.numpy() / trials
