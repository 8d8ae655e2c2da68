"""The range coder's steps, as kernels that others inline (docs/spec/patch.md, section 3).

A coder's state is (low, width, position): the interval [low, low + width) of 64-bit integers, and the next 16-bit word. The
decoder keeps `value`, the code's distance from `low`, instead of `low`. Renormalization shifts out whole words. Waiting times
follow the exact law of a process with a half-life: R(x) of the interval is left after x ticks without a change.
"""

from math import isqrt
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from protocol.patch.jit import kernel

U = numba.uint64

HALF_LIFE_BITS: Final = 20
HALF_LIFE: Final = 1 << HALF_LIFE_BITS
"""Ticks in which half of the interval is used up."""

WINDOW: Final = 16 * HALF_LIFE
"""Ticks that one symbol spans; a longer wait says so and begins anew."""

SURVIVAL_BITS: Final = 10
TAIL_WORDS: Final = 4
"""Words that a decoder may read beyond the end of its section; they count as zero."""

WIDE: Final = 1 << 48
"""Least width of the interval before a waiting time is coded."""

NARROW: Final = 1 << 32
"""Least width of the interval before a bit is coded."""


def survival_table() -> NDArray[np.uint64]:
    """floor(2^32 * 2^(-i/1024)) for i in 0..1024, by integer arithmetic alone: uint64[1025]."""
    one = 1 << 128
    roots = []  # 2^(-1/2), 2^(-1/4), ..., scaled by 2^128
    root = one >> 1
    for _ in range(SURVIVAL_BITS):
        root = isqrt(root << 128)
        roots.append(root)
    table = []
    for index in range(1 << SURVIVAL_BITS):
        value = one
        for bit, root in enumerate(roots):
            if index >> (SURVIVAL_BITS - 1 - bit) & 1:
                value = value * root >> 128
        table.append(value >> 96)
    table.append(1 << 31)
    return np.array(table, dtype=np.uint64)


def logarithm_table() -> NDArray[np.int64]:
    """HALF_LIFE * log2(1 + i/1024) for i in 0..1024, less the exponent bias of a float64: int64[1025].

    Only a first guess that exact integer comparisons correct: its last bits do not matter.
    """
    ticks = np.log2(1.0 + np.arange(1025) / 1024.0) * HALF_LIFE
    return np.rint(ticks).astype(np.int64) - 1023 * HALF_LIFE


def rate_table() -> NDArray[np.uint64]:
    """How far an adaptive bit moves after n observations, of 65536: uint64[256]."""
    return np.array([65536 * 10 // (10 * count + 16) for count in range(256)], dtype=np.uint64)


@kernel()
def surviving(survival: Any, unit: Any, ticks: Any) -> Any:
    """R(ticks): how much of an interval of `unit` * 2^32 is left after `ticks` <= WINDOW; strictly decreasing."""
    index = (ticks >> U(10)) & U(1023)
    above = survival[index]
    level = above - (((above - survival[index + U(1)]) * (ticks & U(1023))) >> U(10))
    return (unit * level) >> (ticks >> U(20))


@kernel()
def widen(low: Any, width: Any, out: Any, position: Any, least: Any) -> Any:
    """Write words until the interval is at least `least` wide; the first of them without a branch to guess."""
    out[position] = low >> U(48)
    narrow = U(width < least)
    position += numba.int64(narrow)
    low = low << (narrow << U(4))
    width = width << (narrow << U(4))
    while width < least:
        out[position] = low >> U(48)
        position += 1
        low = low << U(16)
        width = width << U(16)
    return low, width, position


@kernel()
def advance(low: Any, distance: Any, out: Any, position: Any) -> Any:
    """low + distance; a carry runs into the words already written."""
    total = low + distance
    if total < low:
        back = position - 1
        while back >= 0:
            out[back] += np.uint16(1)
            if out[back] != np.uint16(0):
                break
            back -= 1
    return total


@kernel()
def put_wait(low: Any, width: Any, out: Any, position: Any, survival: Any, start: Any, weight: Any) -> Any:
    """Code that the change falls on the element that spans ticks [start, start + weight)."""
    low, width, position = widen(low, width, out, position, U(WIDE))
    while start >= U(WINDOW):
        if position + 8 > out.size:
            return low, width, position
        width = (width >> U(32)) << U(16)
        low, width, position = widen(low, width, out, position, U(WIDE))
        start -= U(WINDOW)
    unit = width >> U(32)
    end = min(start + weight, U(WINDOW))
    left = surviving(survival, unit, end)
    low = advance(low, left, out, position)
    return low, surviving(survival, unit, start) - left, position


@kernel()
def put_bit(
    low: Any, width: Any, out: Any, position: Any, odds: Any, seen: Any, rates: Any, context: Any, bit: Any
) -> Any:
    """Code one bit by its context's odds, which learn from it."""
    low, width, position = widen(low, width, out, position, U(NARROW))
    odd = U(odds[context])
    split = (width >> U(16)) * odd
    count = seen[context]
    if bit:
        width = split
        odd = min(odd + (((U(65536) - odd) * rates[count]) >> U(16)), U(65504))
    else:
        low = advance(low, split, out, position)
        width -= split
        odd = max(odd - ((odd * rates[count]) >> U(16)), U(32))
    odds[context] = odd
    if count < 255:
        seen[context] = count + 1
    return low, width, position


@kernel()
def finish(low: Any, width: Any, out: Any, position: Any) -> Any:
    """Write the fewest words that name a number of the interval; returns the section's length in words."""
    for keep in range(5):
        drop = U(64 - 16 * keep)
        if keep == 0:
            distance = U(0) - low
        elif keep == 4:
            distance = U(0)
        else:
            distance = (U(0) - low) & ((U(1) << drop) - U(1))
        if distance < width:
            break
    low = advance(low, distance, out, position)
    for word in range(keep):
        out[position + word] = low >> U(48)
        low = low << U(16)
    while keep > 0 and out[position + keep - 1] == 0:
        keep -= 1
    return position + keep


@kernel()
def refill(value: Any, width: Any, words: Any, position: Any, least: Any) -> Any:
    """Read words until the interval is at least `least` wide, the first without a branch; beyond the end they are zero."""
    narrow = U(width < least)
    next_word = U(words[position]) if position < words.size else U(0)
    value = (value << (narrow << U(4))) | (next_word & (U(0) - narrow))
    width = width << (narrow << U(4))
    position += numba.int64(narrow)
    while width < least:
        word = U(0)
        if position < words.size:
            word = U(words[position])
        position += 1
        value = (value << U(16)) | word
        width = width << U(16)
    return value, width, position


@kernel()
def get_bit(
    value: Any, width: Any, words: Any, position: Any, odds: Any, seen: Any, rates: Any, context: Any
) -> Any:
    """The mirror of put_bit."""
    value, width, position = refill(value, width, words, position, U(NARROW))
    odd = U(odds[context])
    split = (width >> U(16)) * odd
    count = seen[context]
    bit = value < split
    if bit:
        width = split
        odd = min(odd + (((U(65536) - odd) * rates[count]) >> U(16)), U(65504))
    else:
        value -= split
        width -= split
        odd = max(odd - ((odd * rates[count]) >> U(16)), U(32))
    odds[context] = odd
    if count < 255:
        seen[context] = count + 1
    return value, width, position, bit
