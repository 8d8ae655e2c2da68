"""The kernels behind the gate: collect the entries of a chunk by class, and put decoded ones back in their places.

Entries are packed like the changes of a patch (protocol/patch/entropy_encoding.py), so the patch codec's kernels sort,
count and code them: size: 32 bits | flag | gap: 21 bits | 1 + class. The flag travels as a raw bit. A value of rank r
has flag r % 2, and size r // 2 + 1 on a grid, or r // 2 + 2 for exact values. An exact value without a rank has size 1,
and its sign as its flag; its 31 other bits travel apart, in the order of the elements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from protocol.kernels.jit import kernel
from protocol.kernels.simd import (
    MAX_CLASSES,
    VECTOR_SIZE,
    class_mask,
    count_classes,
    difference_mask,
    lowest_bit,
    popcount,
)
from protocol.patch.entropy_decoding import CUT_OFF, LEAVES_CLASS, LEAVES_DTYPE, LEFT_OVER, get_bits, nth_one
from protocol.patch.entropy_encoding import put_bits
from protocol.patch.rans import I, U
from protocol.pseudogradient.bit_patterns import bits_of_float, float_of
from protocol.pseudogradient.visibility import (
    MAX_STEPS,
    MAX_UNITS,
    D,
    F,
    W,
    borders,
    exact_rank,
    grid_step,
    rank_of,
    unit_of,
    value_at,
    view_of,
)

UNRANKED_BITS: Final = 31
"""Raw bits of an exact value without a rank."""

UNRANKED: Final = 1
"""Its size."""

NO_STEPS: Final = 0x4B400000
"""The code of 0 grid steps: the bit pattern of `visibility.ROUNDER`."""


@kernel()
def pack_exact(bits: Any, code: Any) -> Any:
    """Return size and flag of an exact value (bit pattern `code`), from the weight's bit pattern."""
    rank = exact_rank(bits, code)
    packed = U(UNRANKED) | U(code >> W(31)) << U(32)
    if rank >= I(0):
        packed = ((U(rank) >> U(1)) + U(UNRANKED + 1)) | (U(rank) & U(1)) << U(32)
    return packed


@kernel()
def pack_grid(bits: Any, code: Any, floor: Any, fraction: Any) -> Any:
    """Return size and flag of a grid value, from the weight's bit pattern and the code of `gate.gate_grid`."""
    _, per_step = grid_step(bits, floor, fraction)
    least_out, least_in = borders(bits, per_step)
    steps = I(code) - I(NO_STEPS)
    outwards = (steps < I(0)) != ((bits >> W(31)) != W(0))
    rank = U(rank_of(abs(steps), outwards, least_out, least_in))
    return ((rank >> U(1)) + U(1)) | (rank & U(1)) << U(32)


def scan(
    base: Any,
    codes: Any,
    tops: Any,
    marks: Any,
    form: Any,
    grid: Any,
    classes: Any,
    gaps: Any,
    changes: Any,
    counts: Any,
    unranked: Any,
    filled: Any,
) -> Any:
    """Append the entries of a multiple of 64 elements; return the total number of entries.

    Args:
        base: bit patterns of the weights: uint32 [n].
        codes, tops, marks: see `gate`.
        form: constants of the classes, see `protocol.patch.context_model.form_of`.
        grid: reference exponent or floor, fraction, and 1 for exact values: uint64[3].
        classes: scratch memory: uint8[64].
        gaps: minus the number of elements of each class since its last entry: int64[MAX_CLASSES].
        changes: array for all entries.
        counts: entries of each group so far: int64[GROUPS].
        unranked: array for the exact values without a rank: uint32.
        filled: position, pending bits and their number in `unranked`: uint64[3].
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    reference, fraction, exact = grid[0], grid[1], grid[2] != U(0)
    position, pending, fill = filled[0], filled[1], filled[2]
    number = U(0)
    for group in range(MAX_CLASSES + 1):
        number += U(counts[group])
    for block in range(tops.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        rest = difference_mask(tops, marks, begin)
        count_classes(tops, begin, shift, mask, first, last, classes, gaps)
        while rest != U(0):
            place = lowest_bit(rest)
            rest &= rest - U(1)
            at = begin + place
            own = U(classes[place])
            members = class_mask(classes, own)
            inside, earlier = I(popcount(members)), I(popcount(members & ((U(1) << place) - U(1))))
            gap = U(earlier - inside - gaps[own])
            gaps[own] = earlier + I(1) - inside
            counts[own + U(1)] += I(1)
            if exact:
                packed = pack_exact(base[at], codes[at])
                if packed & U(0xFFFFFFFF) == U(UNRANKED):
                    value = U(codes[at]) & U(0x7FFFFFFF)
                    position, pending, fill = put_bits(unranked, position, pending, fill, value, U(UNRANKED_BITS))
            else:
                packed = pack_grid(base[at], codes[at], W(reference), W(fraction))
            changes[number] = packed | gap << U(33) | (own + U(1)) << U(54)
            number += U(1)
    filled[0], filled[1], filled[2] = position, pending, fill
    return I(number)


@kernel()
def unpack_exact(bits: Any, change: Any) -> Any:
    """Return an exact value, and whether it is in range; NaN with the value's sign if it has no rank."""
    size, flag = change & U(0xFFFFFFFF), (change >> U(32)) & U(1)
    value, fits = float_of(W(flag << U(31)) | W(0x7FC00000)), True
    if size != U(UNRANKED):
        unit, per_unit = unit_of(bits)
        least_out, least_in = borders(bits, per_unit)
        units, outwards = value_at(I((size - U(UNRANKED + 1)) << U(1) | flag), least_out, least_in)
        magnitude = bits_of_float(F(D(units) * unit))
        negative = outwards != ((bits >> W(31)) != W(0))
        value, fits = float_of(magnitude | W(negative) << W(31)), units <= I(MAX_UNITS)
    return value, fits


@kernel()
def unpack_grid(bits: Any, change: Any, floor: Any, fraction: Any) -> Any:
    """Return a grid value, and whether it is in range."""
    step, per_step = grid_step(bits, floor, fraction)
    least_out, least_in = borders(bits, per_step)
    rank = I(((change & U(0xFFFFFFFF)) - U(1)) << U(1) | ((change >> U(32)) & U(1)))
    steps, outwards = value_at(rank, least_out, least_in)
    value = F(steps) * step
    negative = outwards != ((bits >> W(31)) != W(0))
    return -value if negative else value, steps <= I(MAX_STEPS)


def place(
    base: Any,
    tops: Any,
    form: Any,
    grid: Any,
    changes: Any,
    cursor: Any,
    classes: Any,
    gaps: Any,
    out: Any,
    incomplete: Any,
) -> Any:
    """Write the values of a multiple of 64 elements to their places; return a status.

    Args:
        base, tops, form, grid, classes: see `scan`.
        changes: decoded entries by class (`protocol.patch.entropy_decoding.get_changes`).
        cursor: index of the next entry of each group: int64[GROUPS].
        gaps: number of elements of each class before its next entry: int64[MAX_CLASSES].
        out: result: float32 [n]; zeros before.
        incomplete: result: whether some of 64 elements have an exact value without a rank: uint8 [n / 64].
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    reference, fraction, exact = grid[0], grid[1], grid[2] != U(0)
    in_range = True
    for block in range(tops.size // VECTOR_SIZE):
        begin = U(block) * U(VECTOR_SIZE)
        if I(count_classes(tops, begin, shift, mask, first, last, classes, gaps)) >= I(0):
            continue
        pending = U(0)  # the classes that have an entry in this vector
        for own in range(MAX_CLASSES):
            pending |= (U(gaps[own]) >> U(63)) << U(own)
        while pending != U(0):
            own = lowest_bit(pending)
            pending &= pending - U(1)
            members = class_mask(classes, own)
            number, count = U(cursor[own + U(1)]), I(popcount(members))
            index = gaps[own] + count
            while index < count:
                at = begin + nth_one(members, U(index))
                change = changes[number]
                if exact:
                    value, fits = unpack_exact(base[at], change)
                    if change & U(0xFFFFFFFF) == U(UNRANKED):
                        incomplete[block] = 1
                else:
                    value, fits = unpack_grid(base[at], change, W(reference), W(fraction))
                out[at] = value
                in_range = in_range and fits
                number += U(1)
                index += I(1) + I(changes[number] >> U(33))
            cursor[own + U(1)] = I(number)
            gaps[own] = index - count
    return I(0) if in_range else I(LEAVES_DTYPE)


def complete(base: Any, incomplete: Any, unranked: Any, count: Any, out: Any) -> Any:
    """Put the exact values without a rank in their places; return a status.

    Args:
        base: bit patterns of the chunk's weights: uint32 [n].
        incomplete: see `place`.
        unranked: their bits, followed by at least two integers: uint32; count: how many there are.
        out: bit patterns of the chunk's values from `place`: uint32 [n].
    """
    bits, number, in_range, visible = U(0), I(0), True, True
    for block in range(incomplete.size):
        if incomplete[block] == 0:
            continue
        for i in range(block * VECTOR_SIZE, min((block + 1) * VECTOR_SIZE, out.size)):
            if (out[i] & W(0x7FFFFFFF)) <= W(0x7F800000):
                continue
            if number == I(count):
                return I(CUT_OFF)
            number += I(1)
            magnitude, bits = get_bits(unranked, bits, U(UNRANKED_BITS))
            code = (out[i] & W(0x80000000)) | W(magnitude)
            in_range = in_range and W(magnitude) < W(0x7F800000) and exact_rank(base[i], code) < I(0)
            moved_code = bits_of_float(float_of(base[i]) - float_of(code))
            visible = visible and view_of(moved_code) != view_of(base[i])
            out[i] = code
    if number != I(count):
        return I(LEFT_OVER)
    if not in_range:
        return I(LEAVES_DTYPE)
    return I(0) if visible else I(LEAVES_CLASS)


@dataclass(frozen=True, slots=True)
class Scans:
    """The kernels of this module."""

    scan: Callable[..., int]
    place: Callable[..., int]
    complete: Callable[..., int]


@cache
def scans() -> Scans:
    """Compile the kernels, or load them from numba's cache."""
    words, halves, byte, unsigned, integers = "uint32[::1]", "uint16[::1]", "uint8[::1]", "uint64[::1]", "int64[::1]"
    head = (unsigned, unsigned)
    return Scans(
        scan=kernel(words, words, halves, halves, *head, byte, integers, unsigned, integers, words, unsigned)(scan),
        place=kernel(words, halves, *head, unsigned, integers, byte, integers, "float32[::1]", byte)(place),
        complete=kernel(words, byte, words, "int64", words)(complete),
    )
