"""An index code at the entropy: k chosen of n elements (docs/spec/pseudogradient.md, section 6).

A node is a range of 2^l elements with the number of those that are chosen. It is halved, and the number in the left
half is coded with its hypergeometric probability, so all choices of k elements cost the same: log2 C(n, k) bits. Nodes
are halved in order of their size, from left to right. A node with a single chosen element is not halved: the element's
place in it travels as l raw bits, which is what halving would cost.

The coder is rANS with a state from 2^32 on, words of 32 bits and 2^16 slots.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from protocol.kernels.jit import Int64Array, UInt32Array, UInt64Array, kernel, lazy_kernel
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


@lazy_kernel("int64[:, ::1]", "uint64[::1]", "uint32[::1]")
def fill_slots(offsets: Int64Array, weights: UInt64Array, slots: UInt32Array) -> Any:
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
            # Weights in proportion to C(half, x) * C(half, k - x), from the most likely count outwards: each follows
            # from its neighbour by a ratio of small integers. 2^40 times a numerator, at most 2^20, fits in 64 bits.
            weights[centre - least] = U(1) << U(40)
            for x in range(centre, most):
                weight = weights[x - least] * U((k - x) * (half - x)) // U((x + 1) * (half - k + x + 1))
                weights[x + 1 - least] = weight
            # Both halves are alike, so x and k - x have the same weight.
            for x in range(centre, most + 1):
                weights[k - x - least] = weights[x - least]
            total = U(0)
            for x in range(count):
                total += weights[x]
            # One slot for each count, so that every choice has a code, and the others in proportion to the weights.
            # Rounding down leaves slots over: the most likely count gets them, where they matter least.
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
    """The tables of `fill_slots` for chunks with up to so many chosen elements."""

    offsets: Int64Array
    slots: UInt32Array


@lru_cache(maxsize=4)
def slot_tables(chosen: int) -> SlotTables:
    """Build the tables for up to `chosen` elements of a chunk, at most MAX_CHOSEN."""
    offsets = np.full((MAX_LEVEL + 1, chosen + 1), -1, np.int64)
    size = 0
    # Only nodes that are halved need a table: those with 2 chosen elements or more, but not all of them.
    for level in range(2, MAX_LEVEL + 1):
        half = 1 << (level - 1)
        for k in range(2, min(chosen, 2 * half - 1) + 1):
            offsets[level, k] = size
            size += min(k, half) - max(0, k - half) + 2
    slots = np.zeros(size, np.uint32)
    fill_slots(offsets, np.zeros(MAX_CHOSEN + 1, np.uint64), slots)
    return SlotTables(offsets, slots)


@kernel()
def fill_sums(bitmap: UInt64Array, sums: Int64Array) -> Any:
    """Count the ones of a bitmap before each of its words, and at its end: int64 [CHUNK / 64 + 1]."""
    # Then the ones of any run of words are one subtraction, whichever node asks.
    total = I(0)
    for word in range(CHUNK // 64):
        sums[word] = total
        total += I(popcount(bitmap[word]))
    sums[CHUNK // 64] = total


@kernel()
def count_between(bitmap: UInt64Array, sums: Int64Array, begin: int, size: int) -> Any:
    """Count the ones of a bitmap in an aligned range of a power of two elements."""
    # An aligned range of fewer than 64 elements lies within one word; a larger one begins and ends between words.
    if size < I(64):
        mask = (U(1) << U(size)) - U(1)
        return I(popcount((bitmap[U(begin) >> U(6)] >> U(begin & I(63))) & mask))
    return sums[U(begin + size) >> U(6)] - sums[U(begin) >> U(6)]


@kernel()
def place_in(bitmap: UInt64Array, begin: int) -> Any:
    """Return the place in a range of its only one, which is the first one of the bitmap from its begin on."""
    # A range of fewer than 64 elements lies within a word. A larger one begins with a word: skip those without a one.
    word = U(begin) >> U(6)
    rest = bitmap[word] >> U(begin & I(63))
    if rest != U(0):
        return lowest_bit(rest)
    while rest == U(0):
        word += U(1)
        rest = bitmap[word]
    return (word << U(6)) + lowest_bit(rest) - U(begin)


@kernel()
def node_of(chosen: int, begin: int, level: int) -> Any:
    """Pack a node into one integer: uint64. Its chosen elements: 32 bits | its first element: 24 | its level: 8."""
    return U(chosen) << U(32) | U(begin) << U(8) | U(level)


@kernel()
def parts_of_node(node: int) -> Any:
    """Return the chosen elements, the first element and the level of a node: int64."""
    return I(node >> U(32)), I((node >> U(8)) & U(0xFFFFFF)), I(node & U(0xFF))


@kernel()
def split(
    bitmap: UInt64Array,
    level: int,
    chosen: int,
    tables: tuple[Int64Array, UInt32Array],
    scratch: tuple[Int64Array, UInt64Array],
    codes: UInt32Array,
    bits: tuple[UInt32Array, UInt64Array],
) -> Any:
    """List the symbols of one chunk, and write its raw bits; return the number of symbols.

    Args:
        bitmap: one bit for each element: uint64 [CHUNK / 64].
        level: log2 of the number of elements of the root.
        chosen: number of ones.
        tables: offsets and slots of `SlotTables`.
        scratch: memory for sums (`fill_sums`): int64 [CHUNK / 64 + 1]; and for nodes that wait to be halved:
            uint64 [2 * MAX_NODES].
        codes: result: each symbol's first slot and width: uint32 [n, 2].
        bits: array for the raw bits: uint32; and position, pending bits and their number in it: uint64 [3].
    """
    (offsets, slots), (sums, nodes), (raw, filled) = tables, scratch, bits
    position, pending, fill = filled[0], filled[1], filled[2]
    symbols = I(0)
    fill_sums(bitmap, sums)
    # The queue of nodes to be halved, `head` to `tail`. First in, first out: from the largest to the smallest, and from
    # left to right, which is the order in which the decoder learns how many chosen elements each has.
    head, tail = I(0), I(0)
    if chosen == I(1):
        place = place_in(bitmap, I(0))
        position, pending, fill = put_bits(raw, position, pending, fill, place, U(level))
    elif chosen < I(1) << I(level):
        nodes[0] = node_of(chosen, I(0), level)
        tail = I(1)
    while head < tail:
        k, begin, node_level = parts_of_node(nodes[head])
        head += I(1)
        half = I(1) << (node_level - I(1))
        # One symbol: how many of the k chosen elements are in the left half, from the least possible number on.
        first_half = count_between(bitmap, sums, begin, half)
        at = offsets[node_level, k] + first_half - max(I(0), k - half)
        codes[symbols, 0] = slots[at]
        codes[symbols, 1] = slots[at + I(1)] - slots[at]
        symbols += I(1)
        # A half with none or all of its elements chosen needs no more symbols; with one, its place in raw bits.
        for side in range(2):
            count = first_half if side == 0 else k - first_half
            start = begin + half * I(side)
            if count == I(1):
                place = place_in(bitmap, start)
                position, pending, fill = put_bits(raw, position, pending, fill, place, U(node_level - I(1)))
            elif count > I(1) and count < half:
                nodes[tail] = node_of(count, start, node_level - I(1))
                tail += I(1)
    filled[0], filled[1], filled[2] = position, pending, fill
    return symbols


@lazy_kernel("uint32[:, ::1]", "uint32[::1]")
def put_symbols(codes: UInt32Array, out: UInt32Array) -> Any:
    """Code symbols with rANS from the last to the first; return the index in `out` of the first word.

    Args:
        codes: first slot and width of each symbol: uint32 [n, 2].
        out: words are written from the end: uint32 [n + 2] or more.
    """
    state, position = U(MIN_STATE), I(out.size)
    for reverse in range(codes.shape[0]):
        number = codes.shape[0] - 1 - reverse
        begin, width = U(codes[number, 0]), U(codes[number, 1])
        # The new state is about state * SLOTS / width and must stay below 2^64: write a word first if it would not.
        if state >= width << U(48):
            position -= I(1)
            out[position] = state & U(0xFFFFFFFF)
            state >>= U(32)
        quotient = state // width
        state = (quotient << U(SLOT_BITS)) + begin + (state - quotient * width)
    # The last state comes first in the section, upper word first: with it the decoder begins.
    out[position - I(1)] = state & U(0xFFFFFFFF)
    out[position - I(2)] = state >> U(32)
    return position - I(2)


@kernel()
def symbol_at(slot: int, slots: UInt32Array, table: int, count: int) -> Any:
    """Return the symbol of a slot in the table that begins at index `table` and has `count` symbols."""
    # Bisection: `low` is always a symbol whose first slot is not behind this one.
    low, high = I(0), count - I(1)
    while low < high:
        middle = (low + high + I(1)) >> I(1)
        if U(slots[table + middle]) <= slot:
            low = middle
        else:
            high = middle - I(1)
    return low


@kernel()
def choose_range(bitmap: UInt64Array, begin: int, size: int) -> Any:
    """Set the bits of a range of elements."""
    for place in range(begin, begin + size):
        bitmap[place >> 6] |= U(1) << (U(place) & U(63))
    return I(0)


@kernel()
def join(
    level: int,
    chosen: int,
    tables: tuple[Int64Array, UInt32Array],
    nodes: UInt64Array,
    sections: tuple[UInt32Array, UInt32Array],
    state: UInt64Array,
    bitmap: UInt64Array,
) -> Any:
    """Decode one chunk, the inverse of `split` and `put_symbols`; return a status.

    Whatever the bytes are, a chunk that is not cut off has exactly `chosen` ones: each symbol divides the number of its
    node into two that its halves can have.

    Args:
        level, chosen, tables: see `split`.
        nodes: scratch memory: uint64 [2 * MAX_NODES].
        sections: the words, followed by at least one more: uint32; and the raw bits, followed by at least two more
            integers: uint32.
        state: the rANS state, the index of the next word, and the number of the next raw bit: uint64 [3].
        bitmap: result: uint64 [CHUNK / 64]; zeros before.
    """
    (offsets, slots), (words, raw) = tables, sections
    x, at, bits = state[0], state[1], state[2]
    last_word, last_bit = U(words.size) - U(1), (U(raw.size) - U(2)) << U(5)
    head, tail = I(0), I(0)
    if chosen == I(1):
        place, bits = get_bits(raw, bits, U(level))
        bitmap[place >> U(6)] |= U(1) << (place & U(63))
    elif chosen < I(1) << I(level):
        nodes[0] = node_of(chosen, I(0), level)
        tail = I(1)
    else:
        choose_range(bitmap, I(0), I(chosen))
    while head < tail:
        k, begin, node_level = parts_of_node(nodes[head])
        head += I(1)
        half = I(1) << (node_level - I(1))
        least, table = max(I(0), k - half), offsets[node_level, k]
        # One step of rANS: the state's slot says which symbol, and the state shrinks to what it was before the symbol.
        slot = x & U(SLOTS - 1)
        low = symbol_at(slot, slots, table, min(k, half) - least + I(1))
        first = U(slots[table + low])
        x = (U(slots[table + low + I(1)]) - first) * (x >> U(SLOT_BITS)) + slot - first
        if x < U(MIN_STATE):
            # Beyond the section, the word behind it is read again and again; `at` tells at the end.
            x = x << U(32) | U(words[min(at, last_word)])
            at += U(1)
        first_half = least + low
        for side in range(2):
            count = first_half if side == 0 else k - first_half
            start = begin + half * I(side)
            if count == I(1):
                # So many bits cannot lead out of the node. A next bit far behind the section could lead out of the
                # array, so it is held back to one behind.
                place, bits = get_bits(raw, bits, U(node_level - I(1)))
                place += U(start)
                bitmap[place >> U(6)] |= U(1) << (place & U(63))
                bits = min(bits, last_bit + U(1))
            elif count == half:
                choose_range(bitmap, start, half)
            elif count > I(1):
                nodes[tail] = node_of(count, start, node_level - I(1))
                tail += I(1)
    state[0], state[1], state[2] = x, at, bits
    return I(0) if at <= last_word and bits <= last_bit else I(CUT_OFF)
