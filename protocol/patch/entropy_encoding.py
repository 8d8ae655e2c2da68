"""The encoder's hot loops: find the changes, sort them by class, code them (docs/spec/patch.md, section 3).

A change is *listed* (its gap counted in elements) when its class differs before and after or there are no classes,
*classed* otherwise (its gap counted in elements of its class). In memory it is one integer:

    size of the step: 32 bits | 1 if it goes down | gap: 21 bits | 0 if it is listed, else 1 + its class

Elements are looked at sixty-four at a time, and a block without a change costs no more than a look and the count of its
classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from protocol.kernels.jit import kernel
from protocol.kernels.simd import (
    AHEAD,
    LANES,
    MAX_CLASSES,
    count_classes,
    differing,
    fetch,
    highest,
    lowest,
    members,
    ones,
)
from protocol.patch.rans import LEAST, SLOTS, STEP_SYMBOLS, I, U, class_of, key_of, put_state, put_symbol, symbol_of

OUT_OF_ROOM: Final = -1
"""The changes need more bytes than the elements themselves."""

GROUPS: Final = MAX_CLASSES + 1
"""Groups of changes: listed ones, then the classes."""


@kernel()
def packed(group: Any, gap: Any, before: Any, after: Any, order: Any) -> Any:
    """A change as one integer."""
    step = key_of(after, order) - key_of(before, order)
    down = step >> U(63)
    size = (step ^ U(I(step) >> I(63))) + down
    return size | down << U(32) | gap << U(33) | group << U(54)


def scan_listed(old: Any, new: Any, order: Any, listed: Any, changes: Any, found: Any, symbols: Any) -> Any:
    """Append the changes of elements whose number is a multiple of 64, all of them listed; returns how many there are
    then.

    Args:
        listed: minus the elements since the last change: int64[1].
        changes: room for all changes.
        found: how many there are already.
        symbols: changes by the symbol of their step, which are added to: int64[STEP_SYMBOLS].
    """
    number, due = U(found), U(listed[0])
    for block in range(old.size // LANES):
        begin = U(block) * U(LANES)
        fetch(old, begin + U(AHEAD))
        fetch(new, begin + U(AHEAD))
        rest = differing(old, new, begin)
        while rest != U(0):
            at = begin + lowest(rest)
            rest &= rest - U(1)
            change = packed(U(0), at - due, U(old[at]), U(new[at]), order)
            changes[number] = change
            symbol, _ = symbol_of(change & U(0xFFFFFFFF))
            symbols[symbol] += I(1)
            due = at + U(1)
            number += U(1)
    listed[0] = I(due) - I(old.size)
    return I(number)


def scan(
    old: Any, new: Any, form: Any, order: Any, classes: Any, left: Any, listed: Any, changes: Any, counts: Any
) -> Any:
    """Append the changes of elements whose number is a multiple of 64, by their classes.

    Args:
        form: shift and mask of the exponent, the first class's exponent, the last class: uint64[5].
        classes: scratch: uint8[64].
        left: minus the elements of each class since its last change: int64[MAX_CLASSES].
        listed: minus the elements since the last listed change: int64[1].
        changes: room for all changes.
        counts: changes of each group so far: int64[GROUPS].
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    found = U(0)
    for group in range(GROUPS):
        found += U(counts[group])
    for block in range(old.size // LANES):
        begin = U(block) * U(LANES)
        fetch(old, begin + U(AHEAD))
        fetch(new, begin + U(AHEAD))
        rest = differing(old, new, begin)
        count_classes(old, begin, shift, mask, first, last, classes, left)
        skip = U(0)
        while rest != U(0):
            place = lowest(rest)
            rest &= rest - U(1)
            before, after = U(old[begin + place]), U(new[begin + place])
            own = class_of(before, shift, mask, first, last)
            if class_of(after, shift, mask, first, last) != own:
                changes[found] = packed(U(0), U(I(begin + place) - listed[0]), before, after, order)
                listed[0] = I(begin + place) + I(1)
                counts[0] += I(1)
                left[own] += I(1)
                skip |= U(1) << place
            else:
                mates = members(classes, own) & ~skip
                inside, earlier = I(ones(mates)), I(ones(mates & ((U(1) << place) - U(1))))
                changes[found] = packed(own + U(1), U(earlier - inside - left[own]), before, after, order)
                left[own] = earlier + I(1) - inside
                counts[own + U(1)] += I(1)
            found += U(1)
    listed[0] -= I(old.size)
    return I(found)


def sort(changes: Any, count: Any, ends: Any, into: Any) -> Any:
    """Changes by group, those of a group in their order; `ends` says where each group begins and then where it ends."""
    for number in range(count):
        change = changes[number]
        group = change >> U(54)
        into[U(ends[group])] = change
        ends[group] += I(1)
    return I(0)


def tally(changes: Any, count: Any, elements: Any, symbols: Any) -> Any:
    """Add changes up, by group: elements that gaps passed and that changed, and steps by symbol, [GROUPS,
    STEP_SYMBOLS].
    """
    for number in range(count):
        change = changes[number]
        group = change >> U(54)
        symbol, _ = symbol_of(change & U(0xFFFFFFFF))
        symbols[group, symbol] += I(1)
        elements[group] += I((change >> U(33)) & U(0x1FFFFF)) + I(1)
    return I(0)


def fill_entries(widths: Any, table: Any) -> Any:
    """Encoder tables, [rows, 2 * symbols], from the widths of symbols, [rows, symbols], those of 0 behind the others.

    Of each symbol first 2^64 / width, rounded up; then the width (shifted by 32) and what the symbol adds: where it
    begins, and 4095 for a width of 1, whose 2^64 - 1 makes the quotient one too small.
    """
    for row in range(widths.shape[0]):
        begin = U(0)
        for symbol in range(widths.shape[1]):
            width = U(widths[row, symbol])
            if width == U(0):
                break
            single = U(width == U(1))
            table[row, 2 * symbol] = U(0xFFFFFFFFFFFFFFFF) // width + (U(1) - single)
            table[row, 2 * symbol + 1] = width << U(32) | (begin + single * U(SLOTS - 1))
            begin += width
    return I(0)


@kernel()
def put_entry(state: Any, out: Any, position: Any, table: Any, at: Any) -> Any:
    """Code a symbol by the entry of an encoder table that begins at `at`."""
    return put_symbol(state, out, position, table[at], table[at + U(1)])


def put_changes(
    changes: Any, counts: Any, buckets: Any, known: Any, gaps: Any, steps: Any, n_gaps: Any, n_steps: Any, out: Any
) -> Any:
    """Code gaps and steps of sorted changes; returns where in `out` the words begin, or OUT_OF_ROOM.

    Args:
        counts: changes of each group: int64[GROUPS].
        buckets: of each group, the bits of a bucket of gaps and the number of buckets: uint64[GROUPS, 2].
        known: of each group, how many symbols of steps its table has, others are spelled out: uint64[GROUPS].
        gaps, steps: encoder tables, flat, and how many integers of them are a group's.
    """
    gap_state = step_state = U(LEAST)
    position, behind = I(out.size), U(changes.size)
    for passed in range(GROUPS):
        group = U(GROUPS - 1 - passed)
        shift, beyond, common = buckets[group, U(0)], buckets[group, U(1)], known[group]
        gaps_at, steps_at = group * U(n_gaps), group * U(n_steps)
        for _ in range(counts[group]):
            behind -= U(1)
            change = changes[behind]
            symbol, _ = symbol_of(change & U(0xFFFFFFFF))
            symbol = min(symbol, common)
            step_state, position = put_entry(step_state, out, position, steps, steps_at + U(2) * symbol)
            bucket = ((change >> U(33)) & U(0x1FFFFF)) >> shift
            if bucket < beyond:
                gap_state, position = put_entry(gap_state, out, position, gaps, gaps_at + U(2) * bucket)
            else:
                last = gaps_at + U(2) * (bucket % beyond)
                gap_state, position = put_entry(gap_state, out, position, gaps, last)
                for _ in range(bucket // beyond):
                    if position < I(16):
                        return I(OUT_OF_ROOM)
                    gap_state, position = put_entry(gap_state, out, position, gaps, gaps_at + U(2) * beyond)
            if position < I(16):
                return I(OUT_OF_ROOM)
    position = put_state(step_state, out, position)
    return put_state(gap_state, out, position)


@kernel()
def put_bits(out: Any, position: Any, held: Any, fill: Any, value: Any, width: Any) -> Any:
    """Append the low `width` <= 32 bits of a value that has no others."""
    held |= value << fill
    fill += width
    out[position] = held & U(0xFFFFFFFF)
    full = fill >> U(5)
    return position + full, held >> (full << U(5)), fill & U(31)


def put_raw(changes: Any, counts: Any, buckets: Any, known: Any, out: Any) -> Any:
    """Write what sorted changes say as plain bits, in their order; returns how many bits. Arguments as for put_changes."""
    position, held, fill, number = U(0), U(0), U(0), U(0)
    for group in range(GROUPS):
        shift, common = buckets[U(group), U(0)], known[U(group)]
        mask, width = (U(1) << shift) - U(1), shift + U(1)
        for _ in range(counts[U(group)]):
            change = changes[number]
            number += U(1)
            size = change & U(0xFFFFFFFF)
            low = ((change >> U(33)) & mask) << U(1) | ((change >> U(32)) & U(1))
            position, held, fill = put_bits(out, position, held, fill, low, width)
            symbol, rest = symbol_of(size)
            if symbol >= common:
                rest = highest(size)
                position, held, fill = put_bits(out, position, held, fill, rest, U(5))
            if rest != U(0):
                position, held, fill = put_bits(out, position, held, fill, size & ((U(1) << rest) - U(1)), rest)
    out[position] = held
    return I(position << U(5)) + I(fill)


@dataclass(frozen=True, slots=True)
class Coders:
    """The encoder's kernels of one element width."""

    scan_listed: Callable[..., int]
    scan: Callable[..., int]
    sort: Callable[..., int]
    tally: Callable[..., int]
    fill_entries: Callable[..., int]
    put_changes: Callable[..., int]
    put_raw: Callable[..., int]


@cache
def coders_for(itemsize: int) -> Coders:
    """Compile the kernels for elements of `itemsize` bytes, or load them from numba's cache."""
    element, byte, numbers, signed = f"uint{8 * itemsize}[::1]", "uint8[::1]", "uint64[::1]", "int64[::1]"
    tables = "uint64[:, ::1]"
    return Coders(
        scan_listed=kernel(element, element, numbers, signed, numbers, "int64", signed)(scan_listed),
        scan=kernel(element, element, numbers, numbers, byte, signed, signed, numbers, signed)(scan),
        sort=kernel(numbers, "int64", signed, numbers)(sort),
        tally=kernel(numbers, "int64", signed, "int64[:, ::1]")(tally),
        fill_entries=kernel("uint32[:, ::1]", tables)(fill_entries),
        put_changes=kernel(numbers, signed, tables, numbers, numbers, numbers, "int64", "int64", "uint16[::1]")(
            put_changes
        ),
        put_raw=kernel(numbers, signed, tables, numbers, "uint32[::1]")(put_raw),
    )


assert STEP_SYMBOLS < 128
