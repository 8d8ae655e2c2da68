"""The decoder's hot loops: sections to changes, changes into elements (docs/spec/patch.md, section 3). The mirror of
encoding.py.

The bytes may be hostile and numba does not check: every index is compared with its array's size before it is used, and
every loop consumes elements, changes or words of a section, of each of which there are finitely many.

A decoded change is one integer: size of the step: 32 bits | 1 if it goes down | gap: 31 bits. Behind the last change of
a group stands one with the gap NEVER.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from protocol.kernels.jit import kernel
from protocol.kernels.simd import AHEAD, LANES, MAX_CLASSES, copy, count_classes, fetch, lowest, members, ones
from protocol.patch.entropy_encoding import GROUPS
from protocol.patch.rans import (
    LEAST,
    SLOTS,
    STATE_WORDS,
    STEP_SYMBOLS,
    I,
    U,
    bits_at,
    class_of,
    get_state,
    get_symbol,
    key_of,
)

PAST_THE_END: Final = -2
CUT_OFF: Final = -3
NOT_A_CODE: Final = -4
LEAVES_CLASS: Final = -5
LEAVES_DTYPE: Final = -6
LEFT_OVER: Final = -7
NO_SIZE: Final = -8

NEVER: Final = 1 << 30
"""A gap longer than any chunk."""

reasons: Final = {
    PAST_THE_END: "a gap past the end",
    CUT_OFF: "a section that is cut off",
    NOT_A_CODE: "bytes that no encoder writes",
    LEAVES_CLASS: "a step out of its class",
    LEAVES_DTYPE: "a step out of the dtype",
    LEFT_OVER: "bytes left over in a section",
    NO_SIZE: "a step of no size that the dtype has",
}
"""What is wrong, by the status that a kernel returns."""


def fill_rows(widths: Any, table: Any) -> Any:
    """Decoder tables, [rows, SLOTS], from the widths of symbols, [rows, symbols]; entries as in rans.decoder_row."""
    for row in range(widths.shape[0]):
        slot = U(0)
        for symbol in range(widths.shape[1]):
            width = U(widths[row, symbol])
            for place in range(width):
                table[row, slot] = width | U(place) << U(12) | U(symbol) << U(24)
                slot += U(1)
    return I(0)


@kernel()
def get_bits(raw: Any, bits: Any, width: Any) -> Any:
    """The `width` <= 32 bits from bit `bits` on."""
    place = bits >> U(5)
    window = U(raw[place]) | U(raw[place + U(1)]) << U(32)
    return (window >> (bits & U(31))) & ((U(1) << width) - U(1)), bits + width


@kernel()
def ending(at: Any, end: Any, bits: Any, raw_bits: Any, gap_state: Any, step_state: Any) -> Any:
    """Whether the sections end where the decoder does, in the states that an encoder began with: 0 or what is wrong."""
    if at > end or bits > raw_bits:
        return I(CUT_OFF)
    if at < end or (bits + U(7)) >> U(3) != raw_bits >> U(3):
        return I(LEFT_OVER)
    return I(0) if gap_state == U(LEAST) and step_state == U(LEAST) else I(NOT_A_CODE)


def get_changes(
    elements: Any, counts: Any, words: Any, raw: Any, raw_bits: Any, buckets: Any, known: Any, gaps: Any, steps: Any,
    changes: Any
) -> Any:  # fmt: skip
    """Decode the changes of a chunk of `elements`; returns 0 or what is wrong.

    Args:
        counts: of each group: int64[GROUPS].
        words: the section of words, and at least 8 more that are 0.
        raw: the section of raw bits, and at least 4 more integers.
        raw_bits: bits of that section.
        buckets, known: as for put_changes.
        gaps, steps: decoder tables: [GROUPS, SLOTS].
        changes: room for all of them and one more for each group.
    """
    end = I(words.size) - I(8)
    if end < I(2 * STATE_WORDS):
        return I(CUT_OFF)
    gap_state, at = get_state(words, I(0))
    step_state, at = get_state(words, at)
    if gap_state < U(LEAST) or step_state < U(LEAST):
        return I(NOT_A_CODE)
    bits, number = U(0), U(0)
    for group in range(GROUPS):
        shift, beyond, symbols = buckets[group, 0], buckets[group, 1], known[group]
        passed = U(0)
        for _ in range(counts[group]):
            entry = U(gaps[group, gap_state & U(SLOTS - 1)])
            gap_state, at = get_symbol(gap_state, words, at, entry)
            gap = U(0)
            while entry >> U(24) == beyond and at <= end and passed + gap < U(elements):
                gap += beyond << shift
                entry = U(gaps[group, gap_state & U(SLOTS - 1)])
                gap_state, at = get_symbol(gap_state, words, at, entry)
            gap += (entry >> U(24)) << shift
            entry = U(steps[group, step_state & U(SLOTS - 1)])
            step_state, at = get_symbol(step_state, words, at, entry)
            if at > end or bits > U(raw_bits):
                return I(CUT_OFF)
            low, bits = get_bits(raw, bits, shift + U(1))
            gap += low >> U(1)
            passed += gap + U(1)
            if passed > U(elements):
                return I(PAST_THE_END)
            symbol = entry >> U(24)
            if symbol < symbols:
                octave = max(symbol, U(3)) - U(3)
                rest = octave >> U(2)
                lead = U(4) + (octave & U(3)) if symbol >= U(3) else symbol + U(1)
            else:
                rest, bits = get_bits(raw, bits, U(5))
                lead = U(1)
            fine, bits = get_bits(raw, bits, rest)
            changes[number] = lead << rest | fine | (low & U(1)) << U(32) | gap << U(33)
            number += U(1)
        changes[number] = U(NEVER) << U(33)
        number += U(1)
    return ending(at, end, bits, U(raw_bits), gap_state, step_state)


@kernel()
def stepped(bits: Any, change: Any, back: Any, order: Any) -> Any:
    """The pattern that a change leads to, and whether it stays within the dtype."""
    down = U(I(change << U(31)) >> I(63)) ^ back
    key = key_of(bits, order) + (((change & U(0xFFFFFFFF)) ^ down) - down)
    return bits_at(key & order[3], order), key <= order[3]


@kernel()
def nth_one(mask: Any, number: Any) -> Any:
    """The place of the `number`-th 1 of a mask, counted from 0, by halves and without a branch to guess."""
    place = U(0)
    for halving in range(6):
        half = U(32) >> U(halving)
        below = ones(mask & ((U(1) << half) - U(1)))
        upper = U(0) - U(number >= below)
        number -= below & upper
        mask >>= half & upper
        place += half & upper
    return place


def place_listed(old: Any, new: Any, order: Any, back: Any, changes: Any, cursor: Any, listed: Any) -> Any:
    """Copy a piece of the chunk and make its changes, all of them listed; returns 0 or what is wrong.

    Args:
        back: 2^64 - 1 to take steps back, else 0.
        cursor: the next change of each group: int64[GROUPS].
        listed: elements before the next listed change: int64[1].
    """
    for block in range(new.size // LANES):
        begin = U(block) * U(LANES)
        fetch(old, begin + U(AHEAD))
        fetch(new, begin + U(AHEAD))
        copy(old, new, begin)
    for index in range(new.size // LANES * LANES, new.size):
        new[U(index)] = old[U(index)]
    at, number, inside = listed[0], U(cursor[0]), True
    while at < new.size:
        change = changes[number]
        after, fits = stepped(U(new[U(at)]), change, back, order)
        new[U(at)] = after
        inside = inside and fits
        number += U(1)
        at += I(1) + I(changes[number] >> U(33))
    listed[0] = at - I(new.size)
    cursor[0] = I(number)
    return I(0) if inside else I(LEAVES_DTYPE)


def place(
    old: Any, new: Any, form: Any, order: Any, back: Any, changes: Any, cursor: Any, classes: Any, left: Any,
    listed: Any
) -> Any:  # fmt: skip
    """Copy a piece of the chunk, a multiple of 64 elements, and make its changes; returns 0 or what is wrong.

    Args:
        form: shift and mask of the exponent, the first class's exponent, the last class: uint64[5].
        left: elements of each class before its next change: int64[MAX_CLASSES].
        Others as for place_listed.
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    inside, stays = True, True
    for block in range(new.size // LANES):
        begin = U(block) * U(LANES)
        fetch(old, begin + U(AHEAD))
        fetch(new, begin + U(AHEAD))
        copy(old, new, begin)
        skip = U(0)
        while listed[0] < I(begin) + I(LANES):
            at = U(listed[0])
            change = changes[U(cursor[0])]
            after, fits = stepped(U(new[at]), change, back, order)
            new[at] = after
            inside = inside and fits
            left[class_of(after, shift, mask, first, last)] += I(1)
            skip |= U(1) << (at - begin)
            cursor[0] += I(1)
            listed[0] += I(1) + I(changes[U(cursor[0])] >> U(33))
        if I(count_classes(new, begin, shift, mask, first, last, classes, left)) >= I(0):
            continue
        due = U(0)
        for own in range(MAX_CLASSES):
            due |= (U(left[own]) >> U(63)) << U(own)
        while due != U(0):
            own = lowest(due)
            due &= due - U(1)
            mates = members(classes, own) & ~skip
            number, count = U(cursor[own + U(1)]), I(ones(mates))
            turn = left[own] + count
            while turn < count:
                at = begin + nth_one(mates, U(turn))
                after, fits = stepped(U(new[at]), changes[number], back, order)
                new[at] = after
                inside = inside and fits
                stays = stays and class_of(after, shift, mask, first, last) == own
                number += U(1)
                turn += I(1) + I(changes[number] >> U(33))
            cursor[own + U(1)] = I(number)
            left[own] = turn - count
    listed[0] -= I(new.size)
    if not inside:
        return I(LEAVES_DTYPE)
    return I(0) if stays else I(LEAVES_CLASS)


@dataclass(frozen=True, slots=True)
class Decoders:
    """The decoder's kernels of one element width."""

    fill_rows: Callable[..., int]
    get_changes: Callable[..., int]
    place_listed: Callable[..., int]
    place: Callable[..., int]


@cache
def decoders_for(itemsize: int) -> Decoders:
    """Compile the kernels for elements of `itemsize` bytes, or load them from numba's cache."""
    element, byte, numbers, signed = f"uint{8 * itemsize}[::1]", "uint8[::1]", "uint64[::1]", "int64[::1]"
    table = "uint32[:, ::1]"
    sections = ("uint16[::1]", "uint32[::1]", "int64")
    placed = (numbers, "uint64", numbers, signed)
    return Decoders(
        fill_rows=kernel(table, table)(fill_rows),
        get_changes=kernel("int64", signed, *sections, "uint64[:, ::1]", numbers, table, table, numbers)(get_changes),
        place_listed=kernel(element, element, *placed, signed)(place_listed),
        place=kernel(element, element, numbers, *placed, byte, signed, signed)(place),
    )


assert SLOTS == 4096
assert STEP_SYMBOLS < 256
assert MAX_CLASSES + 1 == GROUPS
