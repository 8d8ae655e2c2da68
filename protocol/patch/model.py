"""Which elements are likely to change: classes of exponents and their weights (docs/spec/patch.md, section 3).

Rounding to BF16 makes small weights change far more often than large ones, about twice as often for each exponent less. A
class is a run of exponents; its weight is the ticks that one of its elements adds to a wait, -log2(1 - p) half-lives for a
chance p of changing. Weights travel as eighths of a power of two: 1 byte a class, a loss of under 0.001 bit a change.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError
from protocol.patch.kernels import kernels_for
from protocol.patch.rangecoder import HALF_LIFE, WINDOW
from protocol.patch.values import Bits, Layout

MAX_CLASSES: Final = 32
MAX_CODE: Final = 192
"""Code of the largest weight, WINDOW: 8 * log2(WINDOW)."""

SAMPLED_ELEMENTS: Final = 1 << 19
"""About how many elements the statistics are taken from."""

MIN_CLASS_CHANGES: Final = 24
CLASSES_PER_TENSOR: Final = 512
"""A class holds at least MIN_CLASS_CHANGES changes and one in CLASSES_PER_TENSOR of the tensor's."""

_eighths: Final = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)
"""floor(2^16 * 2^(i/8))."""


def weight_of(code: int) -> int:
    """The ticks that a code stands for: 1 to WINDOW."""
    return (_eighths[code & 7] << (code >> 3)) >> 16


def code_of(chance: float) -> int:
    """The code whose weight fits a chance of changing best."""
    ticks = -math.log2(max(1.0 - chance, 2.0**-16)) * HALF_LIFE
    return min(MAX_CODE, max(0, round(8 * math.log2(max(ticks, 1.0)))))


@dataclass(frozen=True)
class Model:
    """What a sparse frame says before its chunks.

    Attributes:
        firsts: each class's first exponent, ascending from 0; empty when every change is listed.
        codes: each class's weight, as a code.
        listed_code: the weight of an element in the wait for a listed change, as a code.
    """

    layout: Layout
    firsts: tuple[int, ...]
    codes: tuple[int, ...]
    listed_code: int

    @property
    def contexts(self) -> int:
        """Classes, but at least one."""
        return max(1, len(self.firsts))

    @cached_property
    def classes(self) -> NDArray[np.uint8]:
        """Class by group (sign and exponent): uint8[groups]."""
        exponents = np.arange(self.layout.groups) % self.layout.exponents
        index = np.searchsorted(self.firsts, exponents, side="right") - 1 if self.firsts else exponents * 0
        return index.astype(np.uint8)

    @cached_property
    def weights(self) -> NDArray[np.uint64]:
        """Ticks by group (sign and exponent): uint64[groups]."""
        ticks = np.array([weight_of(code) for code in self.codes] or [0], dtype=np.uint64)
        return ticks[self.classes]

    @property
    def listed_weight(self) -> int:
        """Ticks of an element in the wait for a listed change."""
        return weight_of(self.listed_code)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a sample of a tensor: elements and changes by exponent, changes that leave their sign and exponent."""

    elements: NDArray[np.int64]
    changes: NDArray[np.int64]
    crossings: int
    share: float

    @property
    def density(self) -> float:
        """Estimated share of the elements that change."""
        return (float(self.changes.sum()) + 0.4) / (float(self.elements.sum()) + 1.0)


def take_statistics(old: Bits, new: Bits, layout: Layout) -> Statistics:
    """Statistics of every stride-th block of 4096 elements."""
    stride = max(1, old.size // SAMPLED_ELEMENTS)
    elements, changes = np.zeros((2, layout.groups), dtype=np.int64)
    crossings = np.zeros(1, dtype=np.int64)
    kernels_for(old.itemsize).count_groups(old, new, layout.group_shift, stride, elements, changes, crossings)
    by_exponent = (-1, layout.exponents)
    return Statistics(
        elements.reshape(by_exponent).sum(axis=0),
        changes.reshape(by_exponent).sum(axis=0),
        int(crossings[0]),
        float(elements.sum()) / max(1, old.size),
    )


def _runs(statistics: Statistics) -> list[tuple[int, int]]:
    """Runs of exponents with enough changes each, as (first, behind last)."""
    wanted = max(MIN_CLASS_CHANGES * statistics.share, statistics.changes.sum() / CLASSES_PER_TENSOR, 1.0)
    runs: list[tuple[int, int]] = []
    first, changes = 0, 0
    for exponent, count in enumerate(statistics.changes.tolist()):
        changes += count
        if changes >= wanted and len(runs) < MAX_CLASSES - 1:
            runs.append((first, exponent + 1))
            first, changes = exponent + 1, 0
    if first < len(statistics.changes):
        runs.append((first, len(statistics.changes)))
    return runs


def fit(statistics: Statistics, layout: Layout) -> Model:
    """The model of a compact frame."""
    runs = _runs(statistics)
    chances = [
        (float(statistics.changes[first:end].sum()) + 0.4) / (float(statistics.elements[first:end].sum()) + 1.0)
        for first, end in runs
    ]
    listed = (statistics.crossings + 0.4) / (float(statistics.elements.sum()) + 1.0)
    return Model(layout, tuple(first for first, _ in runs), tuple(code_of(p) for p in chances), code_of(listed))


def uniform(density: float, layout: Layout) -> Model:
    """The model of a fast frame: every change is listed."""
    return Model(layout, (), (), code_of(density))


def write_model(model: Model) -> bytes:
    """Number of classes, (first exponent, code) of each, code of listed changes."""
    pairs: list[Any] = [number for pair in zip(model.firsts, model.codes, strict=True) for number in pair]
    return bytes((len(model.firsts), *pairs, model.listed_code))


def parse_model(layout: Layout, firsts: tuple[int, ...], codes: tuple[int, ...], listed_code: int) -> Model:
    """A model from its fields.

    Raises:
        MalformedError: more classes than there may be, first exponents out of order or out of range, weights out of range.
    """
    if len(firsts) > MAX_CLASSES:
        raise MalformedError(f"{len(firsts)} classes")
    ascending = all(earlier < later for earlier, later in zip(firsts, firsts[1:], strict=False))
    if firsts and (firsts[0] != 0 or not ascending or firsts[-1] >= layout.exponents):
        raise MalformedError("the classes' first exponents are not ascending from 0")
    if max((*codes, listed_code)) > MAX_CODE:
        raise MalformedError(f"a weight above {weight_of(MAX_CODE)} ticks")
    return Model(layout, firsts, codes, listed_code)


assert weight_of(MAX_CODE) == WINDOW
