"""The entropy coder: rANS with fixed tables (docs/spec/patch.md, section 3).

A state is a number from 2^16 to 2^32 - 1. A symbol that has `width` of the 4096 slots, beginning with slot `begin`,
changes the state x to (x // width) * 4096 + begin + x % width. To keep the state in its range, the encoder moves 16
bits from it to the output, and the decoder moves them back. The encoder goes from the last symbol to the first and
writes from the end, so that the decoder reads forwards.

numba caches a compiled kernel until the file of that kernel changes. Other files inline the functions of this one, so
delete `__pycache__` after a change of a formula here.
"""

from functools import cache
from itertools import pairwise
from math import isqrt
from typing import Any, Final

import numba

from protocol.kernels.jit import UInt16Array, UInt64Array, inlined
from protocol.kernels.simd import highest_bit, upper_product

U: Any = numba.uint64
I: Any = numba.int64  # noqa: E741

SLOT_BITS: Final = 12
SLOTS: Final = 1 << SLOT_BITS
MIN_STATE: Final = 1 << 16
"""The smallest state, and the initial one of an encoder."""

STATE_WORDS: Final = 2
HALF_LIFE_BITS: Final = 20
HALF_LIFE: Final = 1 << HALF_LIFE_BITS
"""Ticks within which half of the gaps end."""

MAX_WEIGHT: Final = 16 * HALF_LIFE
SMALLEST_BUCKET: Final = 3 << 16
"""Gaps are grouped in buckets of 2^k gaps, with the largest k for which a bucket spans at most twice this many ticks: a
fifth of a mean gap or less.
"""

MAX_BUCKETS: Final = 31
LAST_HALF_LIFE: Final = 12
"""Gaps of more than so many half-lives have no bucket of their own."""

STEP_SYMBOLS: Final = 123
"""Symbols for the sizes 1, 2, 3, and then four for each octave, distinguished by the two bits below the leading one."""


@cache
def _roots() -> tuple[int, ...]:
    """Return floor(2^64 * 2^(-2^-j)) for j = 1, 2, ..., one for each bit of a fraction of a half-life."""
    # Computed with 128 bits, of which the upper 64 are kept: the errors of the steps add up in the lower ones only.
    roots, root = [], 1 << 127
    for _ in range(HALF_LIFE_BITS):
        root = isqrt(root << 128)
        roots.append(root >> 64)
    return tuple(roots)


def survivors(ticks: int) -> int:
    """Compute 2^(32 - ticks / HALF_LIFE) in integer arithmetic: how many of 2^32 gaps are longer than `ticks`."""
    # The fraction of a half-life bit by bit: the bit of worth 2^-j multiplies by 2^(-2^-j). There is no floating-point
    # arithmetic, so that all machines build the same tables.
    value = 1 << 64
    for number, root in enumerate(_roots()):
        if ticks >> (HALF_LIFE_BITS - 1 - number) & 1:
            value = value * root >> 64
    return value >> (32 + (ticks >> HALF_LIFE_BITS))


def bucket_bits(weight: int) -> int:
    """Return log2 of the number of gaps in one bucket, for elements of `weight` ticks."""
    return max(0, (2 * SMALLEST_BUCKET // weight).bit_length() - 1)


@cache
def gap_widths(weight: int) -> tuple[int, ...]:
    """Return the slots of each bucket of gaps, for elements of `weight` ticks, and last those of all longer gaps."""
    span = weight << bucket_bits(weight)
    buckets = max(1, min(MAX_BUCKETS, LAST_HALF_LIFE * HALF_LIFE // span))
    # A bucket gets the slots of the share of gaps that end in it, but at least one, and so does each that follows.
    edges = [0]
    for number in range(1, buckets + 1):
        edge = SLOTS - (survivors(number * span) >> (32 - SLOT_BITS))
        edges.append(max(edges[-1] + 1, min(edge, SLOTS - 1 - buckets + number)))
    edges.append(SLOTS)
    return tuple(after - before for before, after in pairwise(edges))


def step_widths(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return slots in proportion to weights, at least one each; the first of the largest gets the remaining slots."""
    total, spare = sum(weights), SLOTS - len(weights)
    widths = [1 + weight * spare // total for weight in weights]
    # Shares are rounded down. What is left over changes the largest one least.
    widths[weights.index(max(weights))] += SLOTS - sum(widths)
    return tuple(widths)


@inlined
def put_symbol(state: int, out: UInt16Array, position: int, table: UInt64Array, entry: int) -> Any:
    """Code the symbol whose entry begins at index `entry` of an encoder table (`fill_entries`); return the new state
    and position. Words are written from the end of `out`, the first one at `position`.

    The quotient is exact: the state is below 2^32, so the error of the rounded-up inverse adds less than 1 / width.
    """
    # The new state is about state * SLOTS / width, which must stay below 2^32: else 16 bits move to the output first.
    # There is no branch: the word is always written, and stays if the position moves.
    full = U(state >= table[entry])
    out[position - U(1)] = state & U(0xFFFF)
    position -= full
    state >>= full << U(4)
    # (x // width) * SLOTS + begin + x % width, without the remainder: x + begin + (x // width) * (SLOTS - width).
    quotient = upper_product(state, table[entry + U(1)])
    return state + table[entry + U(2)] + quotient * table[entry + U(3)], position


@inlined
def get_symbol(state: int, words: UInt16Array, position: int, entry: int) -> Any:
    """Update the state after a symbol was decoded; return the new state and position."""
    state = (entry & U(0xFFF)) * (state >> U(SLOT_BITS)) + ((entry >> U(12)) & U(0xFFF))
    # A state below its range takes back the word that the encoder moved out. The word is always read, or the compiler
    # would branch.
    longer, short = (state << U(16)) | U(words[position]), state < U(MIN_STATE)
    return longer if short else state, position + U(short)


@inlined
def put_state(state: int, out: UInt16Array, position: int) -> Any:
    """Write a state, least significant word last; return the new position."""
    for word in range(STATE_WORDS):
        out[position - U(1 + word)] = (state >> U(16 * word)) & U(0xFFFF)
    return position - U(STATE_WORDS)


@inlined
def get_state(words: UInt16Array, position: int) -> Any:
    """Read a state, as written by `put_state`; return it and the new position."""
    state = U(0)
    for word in range(STATE_WORDS):
        state = (state << U(16)) | U(words[position + U(word)])
    return state, position + U(STATE_WORDS)


@inlined
def symbol_of(size: int) -> Any:
    """Return the symbol of a step's size, and how many of the size's low bits the symbol does not determine."""
    # Sizes of one or two bits have a symbol each; larger ones share theirs with others of the same upper three bits.
    # Both results are computed, and a mask picks one: sizes are random, so a branch would be guessed wrong often.
    length = highest_bit(size)
    fine = U(length >= U(2)) * U(0xFFFFFFFFFFFFFFFF)
    rest = (length - U(2)) & fine
    octave = U(3) + (rest << U(2)) + ((size >> rest) & U(3))
    return (octave & fine) | ((size - U(1)) & ~fine), rest


@inlined
def key_of(bits: int, order: UInt64Array) -> Any:
    """Return the key of a bit pattern (values.to_keys) by the constants of Layout.order, without a branch."""
    negative = U(I(bits << order[0]) >> I(63))
    return bits ^ order[1] ^ (negative & order[2])


@inlined
def bits_at(key: int, order: UInt64Array) -> Any:
    """Return the bit pattern of a key by the constants of Layout.order, without a branch."""
    positive = U(I(key << order[0]) >> I(63))
    return key ^ order[1] ^ order[2] ^ (positive & order[2])


@inlined
def class_of(bits: int, shift: int, mask: int, first: int, last: int) -> Any:
    """Return a bit pattern's class: its exponent minus `first`, limited to 0..`last`."""
    exponent = max((bits >> shift) & mask, first) - first
    return min(exponent, last)
