"""An index code at the entropy: k chosen of n elements (docs/spec/pseudogradient.md, section 6).

A node is a range of 2^l elements with the number of those that are chosen. It is halved, and the number in the left
half is coded with its hypergeometric probability, so all choices of k elements cost the same: log2 C(n, k) bits. Nodes
are halved in order of their size, from left to right. A node with a single chosen element is not halved: the element's
place in it travels as l raw bits, which is what halving would cost.

The coder is rANS with a state from 2^32 on, words of 32 bits and 2^16 slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.jit import kernel
from protocol.kernels.simd import lowest_bit, popcount
from protocol.patch.entropy_decoding import CUT_OFF, get_bits
from protocol.patch.entropy_encoding import put_bits
from protocol.patch.rans import I, U

MAX_LEVEL: Final = 12
"""log2 of the largest number of elements that are coded together."""

CHUNK: Final = 1 << MAX_LEVEL
MAX_CHOSEN: Final = 1024
"""Most elements that may be chosen of a chunk."""

SLOT_BITS: Final = 16
SLOTS: Final = 1 << SLOT_BITS
MIN_STATE: Final = 1 << 32
MAX_NODES: Final = MAX_CHOSEN * MAX_LEVEL // 2
"""Upper limit of the nodes of a chunk that are halved: at each level at most one for two chosen elements."""


def fill_slots(offsets: Any, weights: Any, slots: Any) -> Any:
    """Fill the tables of the counts in a left half.

    Args:
        offsets: index of the table of level l and k chosen elements, or -1 if there is none: int64[MAX_LEVEL + 1, n].
        weights: scratch memory: uint64[MAX_CHOSEN + 1].
        slots: result: for each table and each count from the least possible on, its first slot; and SLOTS behind the
            last: uint32.
    """
    for level in range(offsets.shape[0]):
        for chosen in range(offsets.shape[1]):
            if offsets[level, chosen] < 0:
                continue
            half, k = I(1) << I(level - 1), I(chosen)
            least, most = max(I(0), k - half), min(k, half)
            count, centre = most - least + I(1), (k + I(1)) >> I(1)
            weights[centre - least] = U(1) << U(40)
            for x in range(centre, most):
                weight = weights[x - least] * U((k - x) * (half - x)) // U((x + 1) * (half - k + x + 1))
                weights[x + 1 - least] = weight
            total = U(0)
            for x in range(centre, most + 1):
                weights[k - x - least] = weights[x - least]
            for x in range(count):
                total += weights[x]
            slot = I(0)
            at = offsets[level, chosen]
            sum_of_widths = I(0)
            for x in range(count):
                sum_of_widths += I(1) + I(weights[x] * U(SLOTS - count) // total)
            for x in range(count):
                slots[at + x] = slot
                slot += I(1) + I(weights[x] * U(SLOTS - count) // total)
                if x == centre - least:
                    slot += I(SLOTS) - sum_of_widths
            slots[at + count] = slot
    return 0


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The tables for chunks with up to so many chosen elements; see `fill_slots`."""

    offsets: NDArray[np.int64]
    slots: NDArray[np.uint32]


@lru_cache(maxsize=4)
def slot_tables(chosen: int) -> SlotTables:
    """Build the tables for up to `chosen` elements of a chunk, at most MAX_CHOSEN."""
    offsets = np.full((MAX_LEVEL + 1, chosen + 1), -1, np.int64)
    size = 0
    for level in range(2, MAX_LEVEL + 1):
        half = 1 << (level - 1)
        for k in range(2, min(chosen, 2 * half - 1) + 1):
            offsets[level, k] = size
            size += min(k, half) - max(0, k - half) + 2
    slots = np.zeros(size, np.uint32)
    subset_coders().fill_slots(offsets, np.zeros(MAX_CHOSEN + 1, np.uint64), slots)
    return SlotTables(offsets, slots)


@kernel()
def fill_sums(bitmap: Any, sums: Any) -> Any:
    """Count the ones of a bitmap before each of its words, and at its end: int64[65]."""
    total = I(0)
    for word in range(CHUNK // 64):
        sums[word] = total
        total += I(popcount(bitmap[word]))
    sums[CHUNK // 64] = total


@kernel()
def count_between(bitmap: Any, sums: Any, begin: Any, size: Any) -> Any:
    """Count the ones of a bitmap in an aligned range of a power of two elements."""
    if size < I(64):
        mask = (U(1) << U(size)) - U(1)
        return I(popcount((bitmap[U(begin) >> U(6)] >> U(begin & I(63))) & mask))
    return sums[U(begin + size) >> U(6)] - sums[U(begin) >> U(6)]


@kernel()
def place_in(bitmap: Any, begin: Any) -> Any:
    """Return the place in a range of its only one, which is the first one of the bitmap from its begin on."""
    word = U(begin) >> U(6)
    rest = bitmap[word] >> U(begin & I(63))
    if rest != U(0):
        return lowest_bit(rest)
    while rest == U(0):
        word += U(1)
        rest = bitmap[word]
    return (word << U(6)) + lowest_bit(rest) - U(begin)


@kernel()
def split(
    bitmap: Any,
    level: Any,
    chosen: Any,
    offsets: Any,
    slots: Any,
    sums: Any,
    nodes: Any,
    codes: Any,
    raw: Any,
    filled: Any,
) -> Any:
    """List the symbols of one chunk, and write its raw bits; return the number of symbols.

    Args:
        bitmap: one bit for each element: uint64[64].
        level: log2 of the number of elements of the root.
        chosen: number of ones.
        offsets, slots: see `SlotTables`.
        sums: scratch memory: int64[65].
        nodes: scratch memory for the nodes that are to be halved: uint64[2 * MAX_NODES].
        codes: result: each symbol's first slot and width: uint32 [n, 2].
        raw: array for the raw bits: uint32.
        filled: position, pending bits and their number in `raw`: uint64[3].
    """
    position, pending, fill = filled[0], filled[1], filled[2]
    symbols, head, tail = I(0), I(0), I(0)
    fill_sums(bitmap, sums)
    if chosen == I(1):
        place = place_in(bitmap, I(0))
        position, pending, fill = put_bits(raw, position, pending, fill, place, U(level))
    elif chosen < I(1) << I(level):
        nodes[0] = U(chosen) << U(32) | U(level)
        tail = I(1)
    while head < tail:
        node = nodes[head]
        head += I(1)
        own, k, begin = I(node & U(0xFF)), I(node >> U(32)), I((node >> U(8)) & U(0xFFFFFF))
        half = I(1) << (own - I(1))
        first_half = count_between(bitmap, sums, begin, half)
        at = offsets[own, k] + first_half - max(I(0), k - half)
        codes[symbols, 0] = slots[at]
        codes[symbols, 1] = slots[at + I(1)] - slots[at]
        symbols += I(1)
        for side in range(2):
            count = first_half if side == 0 else k - first_half
            start = begin + half * I(side)
            if count == I(1):
                place = place_in(bitmap, start)
                position, pending, fill = put_bits(raw, position, pending, fill, place, U(own - I(1)))
            elif count > I(1) and count < half:
                nodes[tail] = U(count) << U(32) | U(start) << U(8) | U(own - I(1))
                tail += I(1)
    filled[0], filled[1], filled[2] = position, pending, fill
    return symbols


def put_symbols(codes: Any, out: Any) -> Any:
    """Code symbols with rANS from the last to the first; return the index in `out` of the first word.

    Args:
        codes: first slot and width of each symbol: uint32 [n, 2].
        out: words are written from the end: uint32 [n + 2] or more.
    """
    state, position = U(MIN_STATE), I(out.size)
    for reverse in range(codes.shape[0]):
        number = codes.shape[0] - 1 - reverse
        begin, width = U(codes[number, 0]), U(codes[number, 1])
        if state >= width << U(48):
            position -= I(1)
            out[position] = state & U(0xFFFFFFFF)
            state >>= U(32)
        quotient = state // width
        state = (quotient << U(SLOT_BITS)) + begin + (state - quotient * width)
    out[position - I(1)] = state & U(0xFFFFFFFF)
    out[position - I(2)] = state >> U(32)
    return position - I(2)


@kernel()
def symbol_at(slot: Any, slots: Any, table: Any, count: Any) -> Any:
    """Return the symbol of a slot in the table that begins at index `table` and has `count` symbols."""
    low, high = I(0), count - I(1)
    while low < high:
        middle = (low + high + I(1)) >> I(1)
        if U(slots[table + middle]) <= slot:
            low = middle
        else:
            high = middle - I(1)
    return low


@kernel()
def choose_range(bitmap: Any, begin: Any, size: Any) -> Any:
    """Set the bits of a range of elements."""
    for place in range(begin, begin + size):
        bitmap[place >> 6] |= U(1) << (U(place) & U(63))
    return I(0)


@kernel()
def join(
    level: Any,
    chosen: Any,
    offsets: Any,
    slots: Any,
    nodes: Any,
    words: Any,
    raw: Any,
    state: Any,
    bitmap: Any,
) -> Any:
    """Decode one chunk, the inverse of `split` and `put_symbols`; return a status.

    Args:
        words: the words, followed by at least one more: uint32.
        raw: the raw bits, followed by at least two more integers: uint32.
        state: the rANS state, the index of the next word, and the number of the next raw bit: uint64[3].
        bitmap: result: uint64[64]; zeros before.
    """
    x, at, bits = state[0], state[1], state[2]
    last_word, last_bit = U(words.size) - U(1), (U(raw.size) - U(2)) << U(5)
    head, tail = I(0), I(0)
    if chosen == I(1):
        place, bits = get_bits(raw, bits, U(level))
        bitmap[place >> U(6)] |= U(1) << (place & U(63))
    elif chosen < I(1) << I(level):
        nodes[0] = U(chosen) << U(32) | U(level)
        tail = I(1)
    else:
        choose_range(bitmap, I(0), I(chosen))
    while head < tail:
        node = nodes[head]
        head += I(1)
        own, k, begin = I(node & U(0xFF)), I(node >> U(32)), I((node >> U(8)) & U(0xFFFFFF))
        half = I(1) << (own - I(1))
        least, table = max(I(0), k - half), offsets[own, k]
        slot = x & U(SLOTS - 1)
        low = symbol_at(slot, slots, table, min(k, half) - least + I(1))
        first = U(slots[table + low])
        x = (U(slots[table + low + I(1)]) - first) * (x >> U(SLOT_BITS)) + slot - first
        if x < U(MIN_STATE):
            x = x << U(32) | U(words[min(at, last_word)])
            at += U(1)
        first_half = least + low
        for side in range(2):
            count = first_half if side == 0 else k - first_half
            start = begin + half * I(side)
            if count == I(1):
                place, bits = get_bits(raw, bits, U(own - I(1)))
                place += U(start)
                bitmap[place >> U(6)] |= U(1) << (place & U(63))
                bits = min(bits, last_bit + U(1))
            elif count == half:
                choose_range(bitmap, start, half)
            elif count > I(1):
                nodes[tail] = U(count) << U(32) | U(start) << U(8) | U(own - I(1))
                tail += I(1)
    state[0], state[1], state[2] = x, at, bits
    return I(0) if at <= last_word and bits <= last_bit else I(CUT_OFF)


@dataclass(frozen=True, slots=True)
class SubsetCoders:
    """The kernels of this module that other modules do not inline."""

    fill_slots: Callable[..., int]
    put_symbols: Callable[..., int]


@cache
def subset_coders() -> SubsetCoders:
    """Compile the kernels, or load them from numba's cache."""
    return SubsetCoders(
        fill_slots=kernel("int64[:, ::1]", "uint64[::1]", "uint32[::1]")(fill_slots),
        put_symbols=kernel("uint32[:, ::1]", "uint32[::1]")(put_symbols),
    )
