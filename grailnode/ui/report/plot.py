"""Series as inline SVG: axes with round marks, a grid, lines with gaps, points whose tooltip is their value. Places are
in SVG user units; colours are in the page's style.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Final

from markupsafe import Markup

from grailnode.ui.formatting import byte_text, share_text
from grailnode.ui.report.templates import number, part
from grailnode.ui.series import mean

# One size for every plot. The margins are wide enough for the larger letters on phones.
WIDTH: Final = 520.0
HEIGHT: Final = 300.0
LEFT: Final = 74.0
RIGHT: Final = 506.0
TOP: Final = 14.0
BOTTOM: Final = 250.0

_MOST_POINTS: Final = 400  # more are averaged: no screen shows them apart
_MOST_DOTS: Final = 60  # more points would run together: then only the line is drawn
_STEPS: Final = (1, 2, 5, 10)


@dataclass(frozen=True)
class Axis:
    """A map from values to positions, linear or logarithmic.

    Attributes:
        low, high: the values at the two ends, low < high, both positive where `log`.
        start, end: the positions of these ends.
        ticks: (value, label) of the marks, inside [low, high].
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
    ticks = tuple((n * step, f"{n * step:.{digits}f}") for n in range(first, last + 1))
    return Axis(first * step, last * step, start, end, ticks)


def byte_axis(values: Sequence[int], start: float, end: float) -> Axis:
    """Return a logarithmic axis for sizes, with space above the largest; marked at powers of ten, and at 2 and 5 times
    these if they are few.
    """
    positive = [value for value in values if value > 0] or [1, 1000]
    low, high = 1 / _round_step(2 / min(positive)), _round_step(1.6 * max(positive))
    decades = math.log10(high / low)
    every = max(1, math.ceil(decades / 6))
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
    return replace(axis, ticks=ticks)


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not under `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def drawing(identity: str, title: str, description: str, *body: Markup, height: float = HEIGHT) -> Markup:
    """Return an SVG that a screen reader can announce: an image with a name and a description."""
    return part("svg.html", "drawing", identity, title, description, body, WIDTH, height)


def grid(x: Axis, y: Axis, name: str) -> Markup:
    """Draw horizontal rules with their values, and the horizontal axis with its marks and its name."""
    return part("svg.html", "grid", x, y, name, LEFT, RIGHT, BOTTOM)


def line(
    css: str, series: Sequence[tuple[float, float | None]], tooltip: Callable[[float, float], str], x: Axis, y: Axis
) -> Markup:
    """Draw a series: solid at its usual spacing (some are measured every few windows), dashed over longer gaps.

    Args:
        css: the class that gives its colour.
        series: (x, y) in order, y None where nothing was measured.
    """
    points = [(position, at, value) for position, (at, value) in enumerate(_thinned(series)) if value is not None]
    usual = median([after - before for (before, *_), (after, *_) in pairwise(points)] or [1])
    moves: dict[bool, list[str]] = {True: [], False: []}  # by whether they are solid
    for (before, x0, y0), (after, x1, y1) in pairwise(points):
        move = f"M{number(x.at(x0))} {number(y.at(y0))}L{number(x.at(x1))} {number(y.at(y1))}"
        moves[after - before <= usual].append(move)
    solid, dashed = (Markup("").join(moves[is_solid]) for is_solid in (True, False))
    dots = [(x.at(at), y.at(value), tooltip(at, value)) for _, at, value in points]
    dot, radius = ("dot", 3) if len(points) <= _MOST_DOTS else ("spot", 5)
    return part("svg.html", "line", css, solid, dashed, dots, dot, radius)


def _thinned(series: Sequence[tuple[float, float | None]]) -> Sequence[tuple[float, float | None]]:
    """Return a series with at most `_MOST_POINTS` points: the means of neighbours, at the last of them."""
    size = -(-len(series) // _MOST_POINTS)
    if size <= 1:
        return series
    parts = [series[begin : begin + size] for begin in range(0, len(series), size)]
    return [(part[-1][0], mean([value for _, value in part])) for part in parts]


def level(value: float, label: str, y: Axis) -> Markup:
    """Draw a dashed horizontal line with a label above its right end."""
    return part("svg.html", "level", y.at(value), label, LEFT, RIGHT)


def empty_message(words: str) -> Markup:
    """Write a message into the middle of an empty plot."""
    return part("svg.html", "words", words, (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2)
