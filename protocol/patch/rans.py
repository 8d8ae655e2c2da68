"""The entropy coder: rANS with fixed tables (docs/spec/patch.md, section 3).

A state is a number from 2^32 to 2^48 - 1. A symbol with `width` of 4096 slots from `begin` on takes the state x to
(x // width) * 4096 + begin + x % width; sixteen bits leave it, or come back, whenever that keeps it in its range. The
encoder goes from the last symbol to the first and writes from the end, so that the decoder reads forwards.

numba's cache sees changes of the file that a kernel stands in, not of this one: delete `__pycache__` after changing a
formula.
"""

from functools import cache
from itertools import pairwise
from math import isqrt
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from protocol.kernels.jit import kernel
from protocol.kernels.simd import highest, upper_product

U: Any = numba.uint64
I: Any = numba.int64  # noqa: E741

SLOT_BITS: Final = 12
SLOTS: Final = 1 << SLOT_BITS
LEAST: Final = 1 << 32
"""The least state, and the first one of an encoder."""

STATE_WORDS: Final = 3
HALF_LIFE_BITS: Final = 20
HALF_LIFE: Final = 1 << HALF_LIFE_BITS
"""Ticks after which half of the waits are over."""

MAX_WEIGHT: Final = 16 * HALF_LIFE
SMALLEST_BUCKET: Final = 3 << 16
"""Gaps are put in buckets of 2^k, the most that span no more than twice this many ticks: a fifth of a mean wait or
less.
"""

MAX_BUCKETS: Final = 31
LAST_HALF_LIFE: Final = 12
"""Waits of so many half-lives have no bucket of their own."""

STEP_SYMBOLS: Final = 123
"""Sizes 1, 2, 3, then four to an octave: sizes of 2^n and more are told apart by the two bits below the leading one."""


@cache
def _roots() -> tuple[int, ...]:
    """2^(-1/2), 2^(-1/4), ..., scaled by 2^64 and rounded down, one for each bit of a part of a half-life."""
    roots, root = [], 1 << 127
    for _ in range(HALF_LIFE_BITS):
        root = isqrt(root << 128)
        roots.append(root >> 64)
    return tuple(roots)


def surviving(ticks: int) -> int:
    """2^(32 - ticks / HALF_LIFE), by integer arithmetic alone: how many of 2^32 waits are longer."""
    value = 1 << 64
    for number, root in enumerate(_roots()):
        if ticks >> (HALF_LIFE_BITS - 1 - number) & 1:
            value = value * root >> 64
    return value >> (32 + (ticks >> HALF_LIFE_BITS))


def bucket_bits(weight: int) -> int:
    """log2 of the gaps in one bucket, for elements of `weight` ticks."""
    return max(0, (2 * SMALLEST_BUCKET // weight).bit_length() - 1)


@cache
def gap_widths(weight: int) -> tuple[int, ...]:
    """Slots of each bucket of gaps between changes of elements of `weight` ticks, and of all gaps beyond them."""
    span = weight << bucket_bits(weight)
    buckets = max(1, min(MAX_BUCKETS, LAST_HALF_LIFE * HALF_LIFE // span))
    edges = [0]
    for number in range(1, buckets + 1):
        edge = SLOTS - (surviving(number * span) >> (32 - SLOT_BITS))
        edges.append(max(edges[-1] + 1, min(edge, SLOTS - 1 - buckets + number)))
    edges.append(SLOTS)
    return tuple(after - before for before, after in pairwise(edges))


def step_widths(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Slots in proportion to weights, at least one for each; what is left over goes to the first of the largest."""
    total, spare = sum(weights), SLOTS - len(weights)
    widths = [1 + weight * spare // total for weight in weights]
    widths[weights.index(max(weights))] += SLOTS - sum(widths)
    return tuple(widths)


@cache
def decoder_row(widths: tuple[int, ...]) -> NDArray[np.uint32]:
    """For every slot its symbol's width, its place within it (shifted by 12) and the symbol (by 24): [SLOTS]."""
    width = np.array(widths, np.uint32)
    symbols = np.repeat(np.arange(len(widths), dtype=np.uint32), widths)
    places = np.arange(SLOTS, dtype=np.uint32) - (np.cumsum(width, dtype=np.uint32) - width)[symbols]
    row: NDArray[np.uint32] = np.bitwise_or(width[symbols] | places << 12, symbols << 24, dtype=np.uint32)
    return row


@kernel()
def put_symbol(state: Any, out: Any, position: Any, inverse: Any, entry: Any) -> Any:
    """Code a symbol; `position` is where the words that are written already begin, and falls by one when there is one
    more.

    The quotient is exact, since the state is below 2^48 and what rounding the inverse up adds is below 1 / width.
    """
    width = entry >> U(32)
    full = U(state >= width << U(36))
    out[position - I(1)] = state & U(0xFFFF)
    position -= I(full)
    state >>= full << U(4)
    return state + (entry & U(0xFFFFFFFF)) + upper_product(state, inverse) * (U(SLOTS) - width), position


@kernel()
def get_symbol(state: Any, words: Any, position: Any, entry: Any) -> Any:
    """The mirror of put_symbol; `entry` is the decoder table's at the state's slot."""
    state = (entry & U(0xFFF)) * (state >> U(SLOT_BITS)) + ((entry >> U(12)) & U(0xFFF))
    short = U(state < U(LEAST))
    state = (state << (short << U(4))) | (U(words[position]) & (U(0) - short))
    return state, position + I(short)


@kernel()
def put_state(state: Any, out: Any, position: Any) -> Any:
    """Write a state, least significant word last."""
    for word in range(STATE_WORDS):
        out[position - I(1) - word] = (state >> U(16 * word)) & U(0xFFFF)
    return position - I(STATE_WORDS)


@kernel()
def get_state(words: Any, position: Any) -> Any:
    """The mirror of put_state."""
    state = U(0)
    for word in range(STATE_WORDS):
        state = (state << U(16)) | U(words[position + word])
    return state, position + I(STATE_WORDS)


@kernel()
def symbol_of(size: Any) -> Any:
    """The symbol of a step's size, and how many of its low bits that leaves open."""
    length = highest(size)
    fine = U(length >= U(2)) * U(0xFFFFFFFFFFFFFFFF)
    rest = (length - U(2)) & fine
    octave = U(3) + (rest << U(2)) + ((size >> rest) & U(3))
    return (octave & fine) | ((size - U(1)) & ~fine), rest


@kernel()
def key_of(bits: Any, order: Any) -> Any:
    """A bit pattern's place in the order of its dtype (values.Layout.order), without a branch to guess."""
    negative = U(I(bits << order[0]) >> I(63))
    return bits ^ order[1] ^ (negative & order[2])


@kernel()
def bits_at(key: Any, order: Any) -> Any:
    """The bit pattern at a place in the order of its dtype."""
    positive = U(I(key << order[0]) >> I(63))
    return key ^ order[1] ^ order[2] ^ (positive & order[2])


@kernel()
def class_of(bits: Any, shift: Any, mask: Any, first: Any, last: Any) -> Any:
    """A bit pattern's class: its exponent less `first`, from 0 to `last`."""
    exponent = max((bits >> shift) & mask, first) - first
    return min(exponent, last)
