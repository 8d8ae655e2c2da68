"""The model of a sparse frame: how likely elements are to change, and by how much (docs/spec/patch.md, section 3).

Rounding to BF16 makes small weights change far more often than large ones, about twice as often for each smaller
exponent. A class is an exponent; the first and the last class also contain the exponents beyond them. The weight of a
class, in ticks, expresses how likely its elements are to change: -log2(1 - p) half-lives for the probability p. A frame
contains weights as eighths of a power of two, which takes 1 byte for each class and costs under 0.001 bit per change.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError
from protocol.kernels.simd import MAX_CLASSES
from protocol.patch.entropy_decoding import fill_rows
from protocol.patch.entropy_encoding import ENTRY, GROUPS, fill_entries
from protocol.patch.fields import Cursor
from protocol.patch.rans import (
    HALF_LIFE,
    MAX_BUCKETS,
    MAX_WEIGHT,
    SLOTS,
    STEP_SYMBOLS,
    bucket_bits,
    gap_widths,
    step_widths,
)
from protocol.patch.values import Bits, Layout

MAX_CODE: Final = 192
"""The code of the largest weight, MAX_WEIGHT: 8 * log2(MAX_WEIGHT)."""

SAMPLE_ELEMENTS: Final = 1 << 16
"""Number of elements, approximately, from which the classes are chosen."""

SAMPLE_PIECES: Final = 16
"""Number of evenly spaced pieces of the sample."""

MIN_CLASS_CHANGES: Final = 32  # of the first and of the last class

_SYMBOLS: Final = np.arange(STEP_SYMBOLS)
_FINE_BITS: Final = np.maximum(_SYMBOLS - 3, 0) >> 2
"""For each step symbol, the bits of the size that it does not determine."""
_ESCAPED_BITS: Final = 5 + np.where(_SYMBOLS < 3, (_SYMBOLS + 1) >> 1, _FINE_BITS + 2)
"""Raw bits of such a size that is coded as another symbol."""

_eighths: Final = (65536, 71468, 77936, 84990, 92682, 101070, 110218, 120194)
"""floor(2^16 * 2^(i/8))."""


def weight_of(code: int) -> int:
    """Return the weight of a code in ticks, from 1 to MAX_WEIGHT."""
    return (_eighths[code & 7] << (code >> 3)) >> 16


WEIGHTS: Final = np.array([weight_of(code) for code in range(MAX_CODE + 1)])  # a frame's tables need hundreds


def code_of(probability: float) -> int:
    """Return the code whose weight fits a probability of change best."""
    # 1 - p = 2^(-ticks / HALF_LIFE). A probability near 1 counts as one of 16 half-lives, which is MAX_WEIGHT.
    ticks = -math.log2(max(1.0 - probability, 2.0**-16)) * HALF_LIFE
    return min(MAX_CODE, max(0, round(8 * math.log2(max(ticks, 1.0)))))


@dataclass(frozen=True, slots=True)
class ChangeGroup:
    """The model's parameters for the changes of one class, or for all without classes."""

    code: int  # the code of an element's weight
    # the codes of the weights of the first step symbols, at least one, and last of all other symbols together
    steps: bytes


@dataclass(frozen=True)
class Model:
    """The model of a sparse frame."""

    layout: Layout
    first: int
    classes: int
    groups: tuple[ChangeGroup, ...]

    @cached_property
    def form(self) -> NDArray[np.uint64]:
        """The constants of `form_of`: uint64[5]."""
        return form_of(self.layout, self.first, self.classes)

    @cached_property
    def buckets(self) -> NDArray[np.uint64]:
        """For each group, log2 of the size of a bucket of gaps, and the number of buckets: uint64[GROUPS, 2]."""
        # Kernels go through all groups that a model can have, so each has a row; those of no group have no changes.
        table = np.zeros((GROUPS, 2), np.uint64)
        for number, group in enumerate(self.groups):
            weight = weight_of(group.code)
            table[number] = bucket_bits(weight), len(gap_widths(weight)) - 1
        return table

    @cached_property
    def symbols(self) -> NDArray[np.uint64]:
        """For each group, the number of step symbols in its table; others are coded as raw bits: uint64[GROUPS]."""
        table = np.zeros(GROUPS, np.uint64)
        table[: len(self.groups)] = [len(group.steps) - 1 for group in self.groups]
        return table

    def _gap_widths(self) -> list[tuple[int, ...]]:
        return [gap_widths(weight_of(group.code)) for group in self.groups]

    def _step_widths(self) -> list[tuple[int, ...]]:
        return [step_widths(tuple(WEIGHTS[list(group.steps)].tolist())) for group in self.groups]

    def encoder_tables(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Build the encoder tables of gaps and steps (`fill_entries`), by group: uint64 [groups, ENTRY * symbols]."""
        gaps, steps = _array(self._gap_widths(), MAX_BUCKETS + 1), _array(self._step_widths(), STEP_SYMBOLS + 1)
        tables = (
            np.zeros((len(gaps), ENTRY * (MAX_BUCKETS + 1)), np.uint64),
            np.zeros((len(steps), ENTRY * (STEP_SYMBOLS + 1)), np.uint64),
        )
        fill_entries(gaps, tables[0])
        fill_entries(steps, tables[1])
        return tables

    @cached_property
    def decoder_tables(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Build the decoder tables of gaps and of steps, by group: uint32 [groups, SLOTS]; see `fill_rows`."""
        gaps, steps = np.empty((2, len(self.groups), SLOTS), np.uint32)
        fill_rows(_array(self._gap_widths(), MAX_BUCKETS + 1), gaps)
        fill_rows(_array(self._step_widths(), STEP_SYMBOLS + 1), steps)
        return gaps, steps


def _array(rows: list[tuple[int, ...]], symbols: int) -> NDArray[np.uint32]:
    table = np.zeros((len(rows), symbols), np.uint32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def form_of(layout: Layout, first: int, classes: int) -> NDArray[np.uint64]:
    """Return the constants by which kernels classify elements: shift and mask of the exponent, the exponent of the
    first class, the number of the last class, the number of classes: uint64[5].
    """
    return np.array((layout.group_shift, layout.exponents - 1, first, max(classes, 1) - 1, classes), dtype=np.uint64)


class Statistics:
    """The statistics to which a model is fitted, by group."""

    def __init__(self) -> None:
        self.elements = np.zeros(GROUPS, np.int64)  # number of elements
        self.steps = np.zeros((GROUPS, STEP_SYMBOLS), np.int64)  # number of changes by their step symbol

    def model(self, layout: Layout, first: int, classes: int) -> Model:
        """Return the model that fits best, with so many classes from the exponent `first` on."""
        steps = self.steps[: max(1, classes)]
        beyond = np.cumsum(steps[:, ::-1], axis=1)[:, ::-1]  # changes with each symbol or a larger one
        others = np.append(beyond, np.zeros((len(steps), 1), np.int64), axis=1)
        # A group's table has its first symbols, and one entry for all larger ones. So many that the bits are fewest:
        # those of the table, of the symbols by their entropy, and the raw bits of sizes in the table and beyond.
        bits = np.cumsum(8 + steps * (_FINE_BITS - np.log2(np.maximum(steps, 1))), axis=1)
        escaped = np.cumsum((steps * _ESCAPED_BITS)[:, ::-1], axis=1)[:, -2::-1]
        rest = others[:, 1:]
        bits -= rest * np.log2(np.maximum(rest, 1))
        bits[:, :-1] += escaped
        table_sizes = (1 + bits.argmin(axis=1)).tolist()
        total = others[:, :1]
        codes, last = codes_of(steps, total), codes_of(others, total)
        groups = []
        for number, symbols in enumerate(table_sizes):
            # The added constants keep the probability above 0 and below 1 where nothing or everything has changed.
            changes, elements = int(beyond[number, 0]), int(self.elements[number])
            own = codes[number, :symbols].tobytes() + last[number, symbols : symbols + 1].tobytes()
            groups.append(ChangeGroup(code_of((changes + 0.4) / (elements + 1.0)), own))
        return Model(layout, first, classes, tuple(groups))


def codes_of(counts: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the codes of weights in proportion to counts, none of which is above `total`; a count of 0 has a small
    weight.
    """
    # Eighths of a power of two, as `weight_of` reads them. The factor 64 keeps the codes of small counts apart; it is
    # smaller where the largest weight would exceed that of MAX_CODE, since all such counts would look alike.
    factor = np.minimum(64, MAX_WEIGHT / np.maximum(total, 1))
    codes: NDArray[np.uint8] = np.clip(np.rint(8 * np.log2(factor * (counts + 0.2))), 0, MAX_CODE).astype(np.uint8)
    return codes


def sample_changes(old: Bits, new: Bits, layout: Layout) -> NDArray[np.int64]:
    """Count a sample's changes, and its elements, by the exponent of their old value: int64 [2, exponents]."""
    # The exponents differ from row to row, so the sample is spread over the tensor.
    pieces = [slice(0, old.size)]
    if old.size > SAMPLE_ELEMENTS:
        length = SAMPLE_ELEMENTS // SAMPLE_PIECES
        starts = np.linspace(0, old.size - length, SAMPLE_PIECES).astype(np.int64)
        pieces = [slice(start, start + length) for start in starts.tolist()]
    before = np.concatenate([old[piece] for piece in pieces])
    places = np.flatnonzero(before != np.concatenate([new[piece] for piece in pieces]))
    # Elements are many, so one in `stride` tells their exponents well enough.
    stride, shift, mask = max(1, before.size >> 14), layout.group_shift, layout.exponents - 1
    exponents = (own >> shift & mask for own in (before[places], before[::stride]))
    changes, elements = (np.bincount(own, minlength=layout.exponents) for own in exponents)
    return np.stack((changes, np.maximum(changes, stride * elements)))


def _place_bits(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bits that tell which elements change, of so many changes and elements: int64 [2, n]."""
    numbers = np.maximum(1.0, (*counts, counts[1] - counts[0]))
    return np.asarray((-1, 1, -1) @ (numbers * np.log2(numbers)), np.float64)


def classes_of(counts: NDArray[np.int64], size: int | None = None) -> tuple[int, int]:
    """Return the first and the number of the classes that tell best which elements change, by the counts of a sample
    (`sample_changes`) of a tensor of `size` elements; None if the sample is all that there is.
    """
    # Of the runs of exponents, the one whose places take the fewest bits. An outer class also has all exponents beyond
    # it: below, nearly all elements change, which are few but may be half of the changes; above, hardly any.
    lower, upper = counts.cumsum(axis=1), counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    single, span = _place_bits(counts).cumsum(), min(MAX_CLASSES, counts.shape[1]) - 1
    inner = single[span - 1 : -1] - single[:-span]
    bits = _place_bits(lower)[:-span] + inner + _place_bits(upper)[span:]
    first = int((bits <= bits.min() + 1e-3).argmax())  # equal but for rounding, which differs by processor
    last = first + span
    # While an outer class has too few changes to pay for its part of the model, it joins its neighbour.
    minimum = max(1.0, MIN_CLASS_CHANGES * (float(counts[1].sum()) / size if size else 1.0))
    while first < last and lower[0, first] < minimum:
        first += 1
    while last > first and upper[0, last] < minimum:
        last -= 1
    return first, last - first + 1


def write_model(model: Model) -> bytes:
    """Serialize a model: classes, first exponent; for each group its code, its number of step symbols, their codes."""
    groups = (bytes((group.code, len(group.steps) - 1)) + group.steps for group in model.groups)
    return bytes((model.classes, model.first)) + b"".join(groups)


def read_model(cursor: Cursor, layout: Layout) -> Model:
    """Read a model, as written by `write_model`, from hostile bytes; MalformedError for one out of bounds."""
    # The bounds keep the kernels' indices in their arrays: the class of any element has a group, its code a weight, and
    # each symbol an entry.
    classes, first = cursor.byte(), cursor.byte()
    if classes > MAX_CLASSES:
        raise MalformedError(f"{classes} classes", "sparse frame")
    if first + max(classes, 1) > layout.exponents or (classes and not layout.is_float):
        raise MalformedError(f"classes of exponents {first} to {first + classes - 1}", "sparse frame")
    groups = []
    for _ in range(max(1, classes)):
        code, symbols = cursor.byte(), cursor.byte()
        if not 0 < symbols <= STEP_SYMBOLS:
            raise MalformedError(f"{symbols} symbols of steps", "sparse frame")
        groups.append(ChangeGroup(code, cursor.take(symbols + 1)))
        if max(code, *groups[-1].steps) > MAX_CODE:
            raise MalformedError("a weight out of range", "sparse frame")
    return Model(layout, first, classes, tuple(groups))


assert weight_of(MAX_CODE) == MAX_WEIGHT
