"""Binomial tails, and the confidence bounds on rates that calibration needs. Pure arithmetic."""

import math
from typing import Final

_NEGLIGIBLE: Final = 1e-17  # relative size of a term after which the rest of a tail does not change the sum


def binomial_tail(events: int, trials: int, rate: float) -> float:
    """Compute P(X >= events) for X ~ Binomial(trials, rate), to at least 12 correct digits."""
    if not 0 <= events <= trials or not 0.0 <= rate <= 1.0:
        raise ValueError(f"no probability of {events} events in {trials} trials at rate {rate}")
    if events == 0 or rate == 1.0:
        return 1.0
    if rate == 0.0:
        return 0.0
    if events <= trials * rate:
        return 1.0 - _sum(events - 1, trials, rate, step=-1)
    return _sum(events, trials, rate, step=1)


def _sum(start: int, trials: int, rate: float, step: int) -> float:
    """Sum the terms of the distribution from `start` away from the mode, where each term is smaller than the last."""
    term = math.exp(
        math.lgamma(trials + 1)
        - math.lgamma(start + 1)
        - math.lgamma(trials - start + 1)
        + start * math.log(rate)
        + (trials - start) * math.log1p(-rate)
    )
    odds = rate / (1.0 - rate)
    total = 0.0
    k = start
    while 0 <= k <= trials and term > _NEGLIGIBLE * total:
        total += term
        term *= (trials - k) / (k + 1) * odds if step > 0 else k / (trials - k + 1) / odds
        k += step
    return min(1.0, total)


def rate_bound(events: int, trials: int, confidence: float) -> float:
    """Compute an upper bound on a rate after `events` in `trials` (Clopper and Pearson 1934), below which the true rate
    lies with at least the given confidence.
    """
    if trials <= 0 or not 0.0 < confidence < 1.0:
        raise ValueError("a bound needs trials and a confidence between 0 and 1")
    if events >= trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if 1.0 - binomial_tail(events + 1, trials, middle) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return high
