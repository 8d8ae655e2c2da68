"""Which elements are likely to change: classes of exponents and their weights (docs/spec/patch.md, section 3).

Rounding to BF16 makes small weights change far more often than large ones, about twice as often for each exponent less. A
class is a run of exponents; its weight is the ticks that one of its elements adds to a wait, -log2(1 - p) half-lives for a
chance p of changing. Weights travel as eighths of a power of two: 1 byte a class, a loss of under 0.001 bit a change.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError
from protocol.patch.container import Cursor
from protocol.patch.encoding import coders_for
from protocol.patch.rangecoder import CONTEXTS, HALF_LIFE, WINDOW
from protocol.patch.values import Bits, Layout

MAX_CLASSES: Final = 32
MAX_CODE: Final = 192
"""Code of the largest weight, WINDOW: 8 * log2(WINDOW)."""

SAMPLED_ELEMENTS: Final = 1 << 19
"""About how many elements the statistics are taken from."""

FIRST_LOOK_ELEMENTS: Final = 1 << 17
"""About how many elements the classes are chosen from."""

MIN_CLASS_CHANGES: Final = 24
CLASSES_PER_TENSOR: Final = 128
"""A class holds at least MIN_CLASS_CHANGES changes and one in CLASSES_PER_TENSOR of the tensor's."""

PRIOR_CHANGES: Final = 16
"""An adaptive bit starts from a prior where the sample holds at least this many observations of it."""

MAX_PRIORS: Final = 15
PRIOR_COUNT: Final = 16
"""Observations that a prior, or the even odds of the bits below a step's leading one, counts for."""

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
        priors: for each class, the first odds of the first bits of a step's length, of 256.
    """

    layout: Layout
    firsts: tuple[int, ...]
    codes: tuple[int, ...]
    listed_code: int
    priors: tuple[bytes, ...]

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

    def adaptive_bits(self) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """Odds (of 65536) and observations of every adaptive bit at the start of a chunk: [contexts * CONTEXTS]."""
        odds = np.full((self.contexts, CONTEXTS), 1 << 15, np.uint16)
        seen = np.zeros((self.contexts, CONTEXTS), np.uint8)
        seen[:, 32:] = PRIOR_COUNT
        for number, priors in enumerate(self.priors):
            odds[number, : len(priors)] = np.frombuffer(priors, np.uint8).astype(np.uint16) << 8
            odds[number, len(priors) : 32] = priors[-1] << 8 if priors else 1 << 15
            seen[number, : len(priors)] = PRIOR_COUNT
        return odds.reshape(-1), seen.reshape(-1)

    @property
    def listed_weight(self) -> int:
        """Ticks of an element in the wait for a listed change."""
        return weight_of(self.listed_code)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a sample of a tensor, by class.

    Attributes:
        elements: int64[256].
        lengths: changes that keep their class, by the length of their step: int64[256, 32].
        crossings: changes that do not: int64[256].
    """

    elements: NDArray[np.int64]
    lengths: NDArray[np.int64]
    crossings: NDArray[np.int64]

    @property
    def density(self) -> float:
        """Estimated share of the elements that change."""
        return _chance(int(self.lengths.sum()) + int(self.crossings.sum()), int(self.elements.sum()))


def _chance(changes: int, elements: int) -> float:
    return (changes + 0.4) / (elements + 1.0)


def take_statistics(
    old: Bits, new: Bits, layout: Layout, classes: NDArray[np.uint8], sampled: int = SAMPLED_ELEMENTS
) -> Statistics:
    """Statistics of every stride-th block of 4096 elements, about `sampled` of them; class by group: uint8[groups]."""
    stride = max(1, old.size // sampled)
    elements, crossings = np.zeros((2, 256), dtype=np.int64)
    lengths = np.zeros((256, MAX_CLASSES), dtype=np.int64)
    coders_for(old.itemsize, layout.group_shift).count_classes(
        old, new, layout.group_shift, stride, classes, layout.order, elements, lengths.reshape(-1), crossings
    )
    return Statistics(elements, lengths, crossings)


def _first_exponents(statistics: Statistics, share: float) -> tuple[int, ...]:
    """Where classes begin, so that each has enough changes; statistics by exponent, of a share of the tensor."""
    changes = statistics.lengths.sum(axis=1) + statistics.crossings
    wanted = max(MIN_CLASS_CHANGES * share, float(changes.sum()) / CLASSES_PER_TENSOR, 1.0)
    firsts, gathered = [0], 0
    for exponent, count in enumerate(changes.tolist()):
        if gathered >= wanted and count and len(firsts) < MAX_CLASSES:
            firsts.append(exponent)
            gathered = 0
        gathered += count
    return tuple(firsts)


def _priors(lengths: NDArray[np.int64]) -> bytes:
    """First odds of each bit of the length that the sample tells enough about: the chance that it goes on."""
    priors = []
    left = int(lengths.sum())
    for count in lengths[:MAX_PRIORS].tolist():
        if left < PRIOR_CHANGES:
            break
        priors.append(min(255, max(1, round(256 * _chance(left - count, left)))))
        left -= count
    return bytes(priors)


def fit(old: Bits, new: Bits, layout: Layout) -> Model:
    """The model of a compact frame: classes from a first look, everything else from a second one at these classes."""
    exponents = (np.arange(layout.groups) % layout.exponents).astype(np.uint8)
    look = take_statistics(old, new, layout, exponents, FIRST_LOOK_ELEMENTS)
    firsts = _first_exponents(look, float(look.elements.sum()) / old.size)
    bare = Model(layout, firsts, (0,) * len(firsts), 0, (b"",) * len(firsts))
    statistics = take_statistics(old, new, layout, bare.classes)
    changes = statistics.lengths.sum(axis=1).tolist()
    chances = [_chance(changes[number], int(statistics.elements[number])) for number in range(len(firsts))]
    listed = _chance(int(statistics.crossings.sum()), int(statistics.elements.sum()))
    priors = tuple(_priors(lengths) for lengths in statistics.lengths[: len(firsts)])
    return Model(layout, firsts, tuple(code_of(chance) for chance in chances), code_of(listed), priors)


def uniform(old: Bits, new: Bits, layout: Layout) -> Model:
    """The model of a fast frame: every change is listed."""
    statistics = take_statistics(old, new, layout, np.zeros(layout.groups, np.uint8))
    return Model(layout, (), (), code_of(statistics.density), ())


def plain(layout: Layout) -> Model:
    """No classes: what the steps of listed changes are coded with."""
    return Model(layout, (), (), 0, ())


def write_model(model: Model) -> bytes:
    """Number of classes; code of listed changes; of each class its first exponent, code, number of priors and priors."""
    classes = zip(model.firsts, model.codes, model.priors, strict=True)
    return bytes((len(model.firsts), model.listed_code)) + b"".join(
        bytes((first, code, len(priors))) + priors for first, code, priors in classes
    )


def read_model(cursor: Cursor, layout: Layout) -> Model:
    """The mirror of `write_model`.

    Raises:
        MalformedError: more classes than there may be, first exponents out of order or out of range, weights or odds out of
            range.
    """
    count, listed_code = cursor.byte(), cursor.byte()
    if count > MAX_CLASSES:
        raise MalformedError(f"{count} classes", "sparse frame")
    firsts, codes, priors = [], [], []
    for number in range(count):
        firsts.append(cursor.byte())
        codes.append(cursor.byte())
        priors.append(cursor.take(cursor.varint(MAX_PRIORS)))
        if firsts[-1] >= layout.exponents or (firsts[-1] <= firsts[-2] if number else firsts[0] != 0):
            raise MalformedError("first exponents that do not ascend from 0", "sparse frame")
    if max((*codes, listed_code)) > MAX_CODE or 0 in b"".join(priors):
        raise MalformedError("a weight or odds out of range", "sparse frame")
    return Model(layout, tuple(firsts), tuple(codes), listed_code, tuple(priors))


assert weight_of(MAX_CODE) == WINDOW
