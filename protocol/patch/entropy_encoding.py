"""The encoder's kernels: find the changes, sort them by group, code them (docs/spec/patch.md, section 3).

A change belongs to the group of its old value's class, and its gap is counted in elements of this class; without
classes there is one group. In memory, a change is one integer:

    size of the step: 32 bits | 1 if the step goes down | gap: 21 bits | group

The kernels compare 64 elements at a time. For 64 elements without a change, they only count the classes, up to 16.
"""

from typing import Any, Final

from protocol.kernels.jit import Int64Array, UInt8Array, UInt16Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import (
    MAX_CLASSES,
    PREFETCH_DISTANCE,
    VECTOR_SIZE,
    class_mask,
    count_classes,
    difference_mask,
    highest_bit,
    lowest_bit,
    popcount,
    prefetch,
)
from protocol.patch.rans import MIN_STATE, SLOTS, STEP_SYMBOLS, I, U, class_of, key_of, put_state, put_symbol, symbol_of
from protocol.patch.values import Bits

BUFFER_FULL: Final = -1
"""Status of a kernel: the changes need more bytes than the elements themselves."""

ENTRY: Final = 4
"""Integers of a symbol's entry in an encoder table."""

GROUPS: Final = MAX_CLASSES
"""Groups of changes: one for each class, or a single one."""


@inlined
def pack_change(group: int, gap: int, before: int, after: int, order: UInt64Array) -> Any:
    """Pack a change from bit pattern `before` to `after` into one integer."""
    # A step down is a negative number in two's complement: its bits inverted, plus 1, are its size.
    step = key_of(after, order) - key_of(before, order)
    down = step >> U(63)
    size = (step ^ U(I(step) >> I(63))) + down
    return size | down << U(32) | gap << U(33) | group << U(54)


@kernel
def scan_all(
    old: Bits, new: Bits, order: UInt64Array, gap: Int64Array, changes: UInt64Array, count: int, symbols: Int64Array
) -> Any:
    """Append the changes of a multiple of 64 elements without classes; return the total number of changes.

    Args:
        gap: minus the number of elements since the last change: int64[1].
        changes: array for all changes.
        count: number of changes in it so far.
        symbols: number of changes by their step symbol, which is updated: int64[STEP_SYMBOLS].
    """
    number, gap_begin = U(count), U(gap[0])
    for block in range(old.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        prefetch(old, begin + U(PREFETCH_DISTANCE))
        prefetch(new, begin + U(PREFETCH_DISTANCE))
        # A one for each element that differs. Many vectors have none, and cost two loads and a comparison.
        rest = difference_mask(old, new, begin)
        while rest != U(0):
            at = begin + lowest_bit(rest)
            rest &= rest - U(1)
            change = pack_change(U(0), at - gap_begin, U(old[at]), U(new[at]), order)
            changes[number] = change
            symbol, _ = symbol_of(change & U(0xFFFFFFFF))
            symbols[symbol] += I(1)
            gap_begin = at + U(1)
            number += U(1)
    gap[0] = I(gap_begin) - I(old.size)
    return I(number)


@kernel
def scan(
    old: Bits,
    new: Bits,
    form: UInt64Array,
    order: UInt64Array,
    classes: UInt8Array,
    gaps: Int64Array,
    changes: UInt64Array,
    counts: Int64Array,
) -> Any:
    """Append the changes of a multiple of 64 elements, with their groups; return the total number of changes.

    Args:
        form: shift and mask of the exponent, the exponent of the first class, the number of the last class: uint64[5].
        classes: scratch memory: uint8[64].
        gaps: minus the number of elements of each class since its last change: int64[MAX_CLASSES].
        changes: array for all changes.
        counts: changes of each group so far: int64[GROUPS].
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    # A chunk comes in one or two calls (its tail is padded): go on behind the changes of the first.
    number = U(0)
    for group in range(GROUPS):
        number += U(counts[group])
    for block in range(old.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        prefetch(old, begin + U(PREFETCH_DISTANCE))
        prefetch(new, begin + U(PREFETCH_DISTANCE))
        rest = difference_mask(old, new, begin)
        # From here on `gaps` includes the whole vector; a change sets it to what lies behind that change.
        count_classes(old, begin, shift, mask, first, last, classes, gaps)
        while rest != U(0):
            place = lowest_bit(rest)
            rest &= rest - U(1)
            before, after = U(old[begin + place]), U(new[begin + place])
            own = class_of(before, shift, mask, first, last)
            # The gap: the class's elements from the last change to this vector, -gaps - inside, and those before this
            # one in the vector. It is right after an earlier change in the vector, too.
            members = class_mask(classes, own)
            inside, earlier = I(popcount(members)), I(popcount(members & ((U(1) << place) - U(1))))
            changes[number] = pack_change(own, U(earlier - inside - gaps[own]), before, after, order)
            gaps[own] = earlier + I(1) - inside
            counts[own] += I(1)
            number += U(1)
    return I(number)


@kernel
def sort(changes: UInt64Array, count: int, ends: Int64Array, target: UInt64Array) -> Any:
    """Write changes to `target` by group. `ends` is where each group begins, then where it ends: int64[GROUPS]."""
    # Counting sort: the place of each group is known beforehand, so every change is written once.
    for number in range(count):
        change = changes[number]
        group = change >> U(54)
        target[U(ends[group])] = change
        ends[group] += I(1)
    return I(0)


@kernel
def tally(changes: UInt64Array, count: int, elements: Int64Array, symbols: Int64Array) -> Any:
    """Add changes to the statistics of their groups: the number of elements up to the last change, int64[GROUPS], and
    the number of changes by their step symbol, int64[GROUPS, STEP_SYMBOLS].
    """
    for number in range(count):
        change = changes[number]
        group = change >> U(54)
        symbol, _ = symbol_of(change & U(0xFFFFFFFF))
        symbols[group, symbol] += I(1)
        # A gap and its change are all elements from one change to the next.
        elements[group] += I((change >> U(33)) & U(0x1FFFFF)) + I(1)
    return I(0)


@kernel
def fill_entries(widths: UInt32Array, table: UInt64Array) -> Any:
    """Fill encoder tables, uint64 [rows, ENTRY * symbols], from the slots of symbols, uint32 [rows, symbols]: 0 for
    unused ones.

    An entry has four integers: the smallest state from which a word moves out first; 2^64 / width, rounded up; the
    first slot of the symbol; and the slots of all others. For a width of 1, the second is 2^64 - 1, which makes the
    quotient one too small, so the third is 4095 larger.
    """
    for row in range(widths.shape[0]):
        begin = U(0)
        for symbol in range(widths.shape[1]):
            width = U(widths[row, symbol])
            if width != U(0):
                single, entry = U(width == U(1)), ENTRY * symbol
                table[row, entry] = width << U(20)
                table[row, entry + 1] = U(0xFFFFFFFFFFFFFFFF) // width + (U(1) - single)
                table[row, entry + 2] = begin + single * U(SLOTS - 1)
                table[row, entry + 3] = U(SLOTS) - width
            begin += width
    return I(0)


@kernel
def put_changes(
    changes: UInt64Array,
    counts: Int64Array,
    buckets: UInt64Array,
    symbols: UInt64Array,
    gaps: UInt64Array,
    steps: UInt64Array,
    n_gaps: int,
    n_steps: int,
    out: UInt16Array,
) -> Any:
    """Code gaps and steps of sorted changes; return the index in `out` of the first word, or BUFFER_FULL.

    Args:
        counts: changes of each group: int64[GROUPS].
        buckets: for each group, log2 of the size of a bucket of gaps, and the number of buckets: uint64[GROUPS, 2].
        symbols: for each group, the number of step symbols in its table: uint64[GROUPS].
        gaps, steps: encoder tables, flat.
        n_gaps, n_steps: how many integers of the tables belong to one group.
        out: words are written from the end: uint16.
    """
    # rANS is last in, first out: so this goes from the last change to the first, and the decoder reads forwards. Gaps
    # and steps have a state each, so that neither coder waits for the other's result, and share the words.
    gap_state = step_state = U(MIN_STATE)
    position, number = U(out.size), U(changes.size)
    for reverse in range(GROUPS):
        group = U(GROUPS - 1 - reverse)
        shift, beyond, escape = buckets[group, U(0)], buckets[group, U(1)], symbols[group]
        gaps_at, steps_at = group * U(n_gaps), group * U(n_steps)
        for _ in range(counts[group]):
            number -= U(1)
            change = changes[number]
            symbol, _ = symbol_of(change & U(0xFFFFFFFF))
            symbol = min(symbol, escape)
            step_state, position = put_symbol(step_state, out, position, steps, steps_at + U(ENTRY) * symbol)
            bucket = ((change >> U(33)) & U(0x1FFFFF)) >> shift
            # A gap beyond the buckets is written as escapes, one for each run of all buckets, and the bucket that is
            # left. The decoder reads the escapes first, so they are written last.
            if bucket < beyond:
                gap_state, position = put_symbol(gap_state, out, position, gaps, gaps_at + U(ENTRY) * bucket)
            else:
                last = gaps_at + U(ENTRY) * (bucket % beyond)
                gap_state, position = put_symbol(gap_state, out, position, gaps, last)
                for _ in range(bucket // beyond):
                    if position < U(16):
                        return I(BUFFER_FULL)
                    escape_at = gaps_at + U(ENTRY) * beyond
                    gap_state, position = put_symbol(gap_state, out, position, gaps, escape_at)
            # A change writes two words apart from its escapes, and the states take four: 16 words are enough for both.
            if position < U(16):
                return I(BUFFER_FULL)
    # In the order in which the decoder begins: the gaps' state comes first in the section, so it is written last.
    position = put_state(step_state, out, position)
    return I(put_state(gap_state, out, position))


@inlined
def put_bits(out: UInt32Array, position: int, pending: int, fill: int, value: int, width: int) -> Any:
    """Append a value of `width` <= 32 bits behind `fill` pending ones; return position, pending bits and fill."""
    # Fewer than 32 bits are pending, so 32 more fit. The integer is always written, and stays if it is full.
    pending |= value << fill
    fill += width
    out[position] = pending & U(0xFFFFFFFF)
    full = fill >> U(5)
    return position + full, pending >> (full << U(5)), fill & U(31)


@kernel
def put_raw(
    changes: UInt64Array, counts: Int64Array, buckets: UInt64Array, symbols: UInt64Array, out: UInt32Array
) -> Any:
    """Write the raw bits of sorted changes to uint32 `out`, in their order; return the number of bits. The other arrays
    are as for `put_changes`.

    The raw bits are the low bits of the gap, the direction of the step, and the bits of the step's size that its symbol
    does not determine.
    """
    # Forwards, unlike the words: raw bits have no state, so they are read in the order in which they are written.
    position, pending, fill, number = U(0), U(0), U(0), U(0)
    for group in range(GROUPS):
        shift, escape = buckets[U(group), U(0)], symbols[U(group)]
        # A bucket has at most 2^18 gaps (`rans.bucket_bits`), so the place in it and the direction are 19 bits at most.
        mask, width = (U(1) << shift) - U(1), shift + U(1)
        for _ in range(counts[U(group)]):
            change = changes[number]
            number += U(1)
            size = change & U(0xFFFFFFFF)
            low = ((change >> U(33)) & mask) << U(1) | ((change >> U(32)) & U(1))
            position, pending, fill = put_bits(out, position, pending, fill, low, width)
            symbol, rest = symbol_of(size)
            # A rare symbol has no entry in its group's table: its length travels in 5 bits, then all but its upper bit.
            if symbol >= escape:
                rest = highest_bit(size)
                position, pending, fill = put_bits(out, position, pending, fill, rest, U(5))
            if rest != U(0):
                position, pending, fill = put_bits(out, position, pending, fill, size & ((U(1) << rest) - U(1)), rest)
    out[position] = pending
    return I(position << U(5)) + I(fill)


assert STEP_SYMBOLS < 128
