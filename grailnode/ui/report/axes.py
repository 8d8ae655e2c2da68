"""Linear and logarithmic axes with round tick marks: they map values to places on a plot, in SVG user units."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from grailnode.ui.formatting import byte_text, share_text

_STEPS: Final = (1, 2, 5, 10)


@dataclass(frozen=True)
class Axis:
    """A map from values to positions.

    Attributes:
        low, high: the values at the two ends, low < high, both positive where `log`.
        start, end: the positions of these ends.
        ticks: (value, label) of the marks, inside [low, high].
        log: whether the axis is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value; values outside lie at the ends."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def count_axis(values: Sequence[int], start: float, end: float, marks: int = 7) -> Axis:
    """Return an axis for window and version numbers: it spans them exactly and is marked at whole numbers only."""
    low, high = (min(values), max(values)) if values else (0, 1)
    step = max(1, round(_round_step((high - low) / marks))) if high > low else 1
    first = -(-low // step) * step
    ticks = tuple((float(n), f"{n:,}") for n in range(first, high + 1, step)) or ((float(low), f"{low:,}"),)
    pad = 0.0 if high > low else 0.5  # a single point lies in the middle
    return Axis(low - pad, high + pad, start, end, ticks)


def share_axis(values: Sequence[float], start: float, end: float, least: float = 0.1) -> Axis:
    """Return an axis for shares and rewards: round ends around the values, at least `least` apart, within [0, 1] if the
    values are.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    inside = low >= 0 and high <= 1
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
        if inside:
            shift = max(0.0, -low) - max(0.0, high - 1)
            low, high = low + shift, high + shift
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return Axis(first * step, last * step, start, end, _every(step, first, last, lambda v: f"{v:.{digits}f}"))


def byte_axis(values: Sequence[int], start: float, end: float) -> Axis:
    """Return a logarithmic axis for sizes, with space above the largest; marked at powers of ten, and at 2 and 5 times
    these if they are few.
    """
    positive = [value for value in values if value > 0] or [1, 1000]
    low, high = 1 / _round_step(2 / min(positive)), _round_step(1.6 * max(positive))
    decades = math.log10(high / low)
    every = 1 if decades <= 6 else math.ceil(decades / 6)
    factors = (1, 2, 5) if decades <= 1.5 else (1,)
    exponents = range(math.floor(math.log10(low) + 1e-9), math.floor(math.log10(high) + 1e-9) + 1, every)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    ticks = tuple(
        (mark, byte_text(round(mark)).replace(".0 ", " ")) for mark in marks if low * 0.999 < mark < high * 1.001
    )
    return Axis(low, high, start, end, ticks, log=True)


def sparsity_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis for sparsities, from below the smallest up to exactly 1."""
    axis = share_axis([*values, 1.0], start, end, least=0.02)
    ticks = tuple((value, label if value < 1 else share_text(1.0)[: len(label)]) for value, label in axis.ticks)
    return Axis(axis.low, axis.high, start, end, ticks)


def _every(step: float, first: int, last: int, label: Callable[[float], str]) -> tuple[tuple[float, str], ...]:
    return tuple((n * step, label(n * step)) for n in range(first, last + 1))


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not under `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))
