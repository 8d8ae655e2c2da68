"""How well pass@k is known: the interval that a number of held-out problems gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from protocol.judging.ledger import pass_at_k

_Z: Final = 1.959964  # standard deviations of a normal distribution on both sides of 95%


@dataclass(frozen=True)
class PassRate:
    """pass@k with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}  (95%: {self.low:.3f} to {self.high:.3f})"


def pass_rate(right: Sequence[int], k: int) -> PassRate:
    """Return pass@k of some problems, and the interval in which that of all such problems is.

    It is Wilson's interval (1927), with the number of independent tries that the problems are worth: as many as there
    are problems if all completions of a problem end alike, and more if they do not (the effective sample size of Korn
    and Graubard, 1998).
    """
    problems, completions = sum(right), len(right) - 1
    mean = pass_at_k(right, k)
    by_count = [pass_at_k([int(count == place) for place in range(completions + 1)], k) for count in range(len(right))]
    squares = sum(number * (value - mean) ** 2 for number, value in zip(right, by_count, strict=True))
    tries = float(problems)
    if 0.0 < mean < 1.0:
        most = problems * (completions // k)  # if completions of a problem were as independent as problems are
        tries = min(max(tries, problems**2 * mean * (1 - mean) / squares if squares else most), most)
    middle = (mean + _Z**2 / (2 * tries)) / (1 + _Z**2 / tries)
    half = _Z * sqrt(mean * (1 - mean) / tries + _Z**2 / (4 * tries**2)) / (1 + _Z**2 / tries)
    return PassRate(mean, max(0.0, middle - half), min(1.0, middle + half))
