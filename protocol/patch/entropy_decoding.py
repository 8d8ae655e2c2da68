"""The decoder's kernels: decode the changes of the sections, and apply them to the elements (docs/spec/patch.md,
section 3). They mirror entropy_encoding.py.

The bytes may be hostile, and numba checks no index. So every index is compared with its array's size before it is used,
and every iteration of a loop consumes elements, changes or words of a section, of which there are finitely many.

A decoded change is one integer: size of the step: 32 bits | 1 if the step goes down | gap: 31 bits. The last change of
each group is followed by one with the gap NEVER.
"""

from typing import Any, Final

from protocol.kernels.jit import Int64Array, UInt8Array, UInt16Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import (
    PREFETCH_DISTANCE,
    VECTOR_SIZE,
    class_mask,
    copy,
    count_classes,
    lowest_bit,
    nth_one,
    popcount,
    prefetch,
)
from protocol.patch.entropy_encoding import GROUPS
from protocol.patch.rans import (
    MIN_STATE,
    SLOTS,
    STATE_WORDS,
    STEP_SYMBOLS,
    I,
    U,
    bits_at,
    get_state,
    get_symbol,
    key_of,
)
from protocol.patch.values import Bits

PAST_THE_END: Final = -2
CUT_OFF: Final = -3
NOT_A_CODE: Final = -4
UNCHANGED_VIEW: Final = -5
LEAVES_DTYPE: Final = -6
LEFT_OVER: Final = -7

NEVER: Final = 1 << 30
"""A gap longer than any chunk."""

reasons: Final = {
    PAST_THE_END: "a gap past the end",
    CUT_OFF: "a section that is cut off",
    NOT_A_CODE: "bytes that no encoder writes",
    LEAVES_DTYPE: "a step out of the dtype",
    LEFT_OVER: "bytes left over in a section",
}
"""The message for each negative status that a kernel returns."""


@kernel
def fill_rows(widths: UInt32Array, table: UInt32Array) -> Any:
    """Fill decoder tables, uint32 [rows, SLOTS], from the slots of each symbol, uint32 [rows, symbols]: for every slot
    its symbol's width, its place within the symbol (shifted left by 12) and the symbol (shifted left by 24).
    """
    for row in range(widths.shape[0]):
        slot = U(0)
        for symbol in range(widths.shape[1]):
            width = U(widths[row, symbol])
            for place in range(width):
                table[row, slot] = width | U(place) << U(12) | U(symbol) << U(24)
                slot += U(1)
    return I(0)


@inlined
def get_bits(raw: UInt32Array, bits: int, width: int) -> Any:
    """Read `width` <= 32 bits from bit `bits` on; return them and the number of the next bit."""
    # 31 bits before the first one and 32 of the value: two integers hold them, wherever they begin.
    place = bits >> U(5)
    window = U(raw[place]) | U(raw[place + U(1)]) << U(32)
    return (window >> (bits & U(31))) & ((U(1) << width) - U(1)), bits + width


@inlined
def check_end(at: int, end: int, raw: UInt32Array, bits: int, raw_bits: int, gap_state: int, step_state: int) -> Any:
    """Check that the decoder ends where the sections end, in the initial states of an encoder; return a status."""
    # An encoder begins where the decoder ends, so all that it wrote is used up, and its states are the initial ones.
    if at > end or bits > raw_bits:
        return I(CUT_OFF)
    if at < end or (bits + U(7)) >> U(3) != raw_bits >> U(3):
        return I(LEFT_OVER)
    # The last byte's remaining bits are 0, as are those of the integer behind it.
    if U(raw[bits >> U(5)]) >> (bits & U(31)) != U(0):
        return I(NOT_A_CODE)
    return I(0) if gap_state == U(MIN_STATE) and step_state == U(MIN_STATE) else I(NOT_A_CODE)


@kernel
def get_changes(
    elements: int,
    counts: Int64Array,
    words: UInt16Array,
    raw: UInt32Array,
    raw_bits: int,
    buckets: UInt64Array,
    symbols: UInt64Array,
    gaps: UInt32Array,
    steps: UInt32Array,
    changes: UInt64Array,
) -> Any:
    """Decode the changes of a chunk; return a status.

    Args:
        elements: number of elements of the chunk.
        counts: changes of each group: int64[GROUPS].
        words: the section of words, followed by at least 8 zeros: uint16.
        raw: the section of raw bits, followed by at least 4 integers: uint32.
        raw_bits: number of bits of that section.
        buckets, symbols: as for `put_changes`.
        gaps, steps: decoder tables: uint32 [GROUPS, SLOTS].
        changes: result: array for all changes and one more for each group: uint64.
    """
    # Both sections are longer than what is read between two checks. In one change, at most two words are read after
    # `at` was compared with `end`, and 55 raw bits after `bits` was compared with `raw_bits`.
    if words.size < 8 + 2 * STATE_WORDS:
        return I(CUT_OFF)
    end = U(words.size) - U(8)
    # No encoder ends with a state below the range, and `get_symbol` counts on that.
    gap_state, at = get_state(words, U(0))
    step_state, at = get_state(words, at)
    if gap_state < U(MIN_STATE) or step_state < U(MIN_STATE):
        return I(NOT_A_CODE)
    bits, number = U(0), U(0)
    for group in range(GROUPS):
        shift, beyond, escape = buckets[group, 0], buckets[group, 1], symbols[group]
        place = U(0)
        for _ in range(counts[group]):
            entry = U(gaps[group, gap_state & U(SLOTS - 1)])
            gap_state, at = get_symbol(gap_state, words, at, entry)
            # Escapes first. Each adds a run of all buckets to the gap, so the elements of the chunk bound their number.
            gap = U(0)
            while entry >> U(24) == beyond and at <= end and place + gap < U(elements):
                gap += beyond << shift
                entry = U(gaps[group, gap_state & U(SLOTS - 1)])
                gap_state, at = get_symbol(gap_state, words, at, entry)
            gap += (entry >> U(24)) << shift
            entry = U(steps[group, step_state & U(SLOTS - 1)])
            step_state, at = get_symbol(step_state, words, at, entry)
            if at > end or bits > U(raw_bits):
                return I(CUT_OFF)
            # `place` is what the group has used of the chunk: each change takes its gap and its own element. A class
            # may have fewer elements than that: `sparse.Decoder` checks that every change was reached.
            low, bits = get_bits(raw, bits, shift + U(1))
            gap += low >> U(1)
            place += gap + U(1)
            if place > U(elements):
                return I(PAST_THE_END)
            # The step's size: the leading bits follow from the symbol (the inverse of `rans.symbol_of`), or are a one
            # at the place that 5 raw bits give; the rest are raw bits.
            symbol = entry >> U(24)
            if symbol < escape:
                octave = max(symbol, U(3)) - U(3)
                rest = octave >> U(2)
                lead = U(4) + (octave & U(3)) if symbol >= U(3) else symbol + U(1)
            else:
                rest, bits = get_bits(raw, bits, U(5))
                lead = U(1)
            fine, bits = get_bits(raw, bits, rest)
            changes[number] = lead << rest | fine | (low & U(1)) << U(32) | gap << U(33)
            number += U(1)
        # What applies a group's last change looks at the gap of the one behind it: that lies beyond every chunk.
        changes[number] = U(NEVER) << U(33)
        number += U(1)
    return check_end(at, end, raw, bits, U(raw_bits), gap_state, step_state)


@inlined
def apply_change(new: Bits, at: int, change: int, order: UInt64Array, places: Int64Array, place_count: int) -> Any:
    """Apply a change to an element and note its place; return whether the new bits stay in the dtype."""
    # All ones for a step down: then (size ^ down) - down is minus the size. A key that leaves the dtype on either side
    # is larger than the largest one, as these are 64-bit integers without a sign.
    down = U(I(change << U(31)) >> I(63))
    key = key_of(U(new[at]), order) + (((change & U(0xFFFFFFFF)) ^ down) - down)
    new[at], places[place_count] = bits_at(key & order[3], order), I(at)
    return key <= order[3]


@kernel
def apply_all(
    old: Bits,
    new: Bits,
    order: UInt64Array,
    changes: UInt64Array,
    cursor: Int64Array,
    places: Int64Array,
    gap: Int64Array,
) -> Any:
    """Copy a piece of the chunk and apply its changes without classes; return their number, or a status.

    `cursor` is the index of the next change of each group: int64[GROUPS]; `gap` the number of elements before the next
    change: int64[1]. `places` gets the indices of the changed elements in the piece, and has room for all its elements.
    """
    # The whole piece first, 64 elements at a time, and then its changes, which are few.
    for block in range(new.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        prefetch(old, begin + U(PREFETCH_DISTANCE))
        prefetch(new, begin + U(PREFETCH_DISTANCE))
        copy(old, new, begin)
    for index in range(new.size // VECTOR_SIZE * VECTOR_SIZE, new.size):
        new[U(index)] = old[U(index)]
    # `gap` and `cursor` go on from piece to piece, so that a gap may lead across pieces.
    at, number, place_count, in_dtype = gap[0], U(cursor[0]), U(0), True
    while at < new.size:
        in_dtype = in_dtype & apply_change(new, U(at), changes[number], order, places, place_count)
        place_count, number = place_count + U(1), number + U(1)
        at += I(1) + I(changes[number] >> U(33))
    gap[0] = at - I(new.size)
    cursor[0] = I(number)
    return I(place_count) if in_dtype else I(LEAVES_DTYPE)


@kernel
def apply_changes(
    old: Bits,
    new: Bits,
    form: UInt64Array,
    order: UInt64Array,
    changes: UInt64Array,
    cursor: Int64Array,
    places: Int64Array,
    classes: UInt8Array,
    gaps: Int64Array,
) -> Any:
    """Copy a piece of the chunk, a multiple of 64 elements, and apply its changes; return their number, or a status.

    Args:
        form: shift and mask of the exponent, the exponent of the first class, the number of the last class: uint64[5].
        classes: scratch memory: uint8[64].
        gaps: number of elements of each class before its next change: int64[MAX_CLASSES].
        cursor, places: as for `apply_all`.
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    in_dtype, place_count = True, U(0)
    for block in range(new.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        prefetch(old, begin + U(PREFETCH_DISTANCE))
        prefetch(new, begin + U(PREFETCH_DISTANCE))
        copy(old, new, begin)
        # 1. Count the elements of each class. A class whose gap is used up has a change in this vector; `pending` has
        #    a one for it. Many vectors have none, and end here.
        pending = count_classes(new, begin, shift, mask, first, last, classes, gaps)
        while pending != U(0):
            own = lowest_bit(pending)
            pending &= pending - U(1)
            members = class_mask(classes, own)
            # 2. What was left of the gap before this vector is the index of the changed element among its members here.
            #    A change may lead to another class: the classes are those before all changes of the vector.
            number, count = U(cursor[own]), I(popcount(members))
            index = gaps[own] + count
            while index < count:
                at = begin + nth_one(members, U(index))
                in_dtype = in_dtype & apply_change(new, at, changes[number], order, places, place_count)
                place_count += U(1)
                number += U(1)
                index += I(1) + I(changes[number] >> U(33))
            cursor[own] = I(number)
            gaps[own] = index - count
    return I(place_count) if in_dtype else I(LEAVES_DTYPE)


assert SLOTS == 4096
assert STEP_SYMBOLS < 256
