"""The range coder's numbers, and the formulas that both its sides share (docs/spec/patch.md, section 3).

A coder's state is (low, width, position): the interval [low, low + width) of 64-bit integers, and the next 16-bit word. The
decoder keeps `value`, the code's distance from `low`, instead of `low`. Renormalization shifts out whole words. Waiting times
follow the exact law of a process with a half-life: R(x) of the interval is left after x ticks without a change.

numba's cache sees changes of the file that a kernel stands in, not of this one: delete `__pycache__` after changing a formula.
"""

from math import isqrt
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from protocol.patch.jit import kernel

U: Any = numba.uint64
I: Any = numba.int64  # noqa: E741

FULL: Final = 0xFFFFFFFFFFFFFFFF
"""Width of the interval at the beginning."""

CONTEXTS: Final = 128
"""Adaptive bits of one class: 0..31 for the length of a step, 32..63 and 64..127 for the two bits below its leading one."""

MAX_LENGTH: Final = 31
"""Bits below the leading one of the largest step, 2^32 - 1."""

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
    table: NDArray[np.int64] = np.rint(ticks).astype(np.int64) - 1023 * HALF_LIFE
    return table


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
def key_of(bits: Any, order: Any) -> Any:
    """A bit pattern's place in the order of its dtype (values.Layout.order), without a branch to guess."""
    sign = (bits >> order[0]) & U(1)
    return bits ^ order[1] ^ ((U(0) - sign) & order[2])


@kernel()
def bits_at(key: Any, order: Any) -> Any:
    """The bit pattern at a place in the order of its dtype."""
    sign = U(1) - ((key >> order[0]) & U(1))
    return key ^ order[1] ^ ((U(0) - sign) & order[2])
