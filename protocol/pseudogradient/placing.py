"""The decoder's kernel: put decoded entries back in their places. It mirrors scanning.py.

The entries may be hostile. Their number in a block is at most that of its elements, since each has a place of its own;
sizes are limited before they become ranks; and the raw bits are counted before they are read.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from protocol.kernels.jit import kernel
from protocol.kernels.simd import VECTOR_SIZE, add_squares, class_mask, count_classes, lowest_bit, nth_one, popcount
from protocol.patch.entropy_decoding import CUT_OFF, LEAVES_CLASS, LEAVES_DTYPE, get_bits
from protocol.patch.rans import I, U
from protocol.pseudogradient.arithmetic import INFINITE
from protocol.pseudogradient.bit_patterns import bits_of_float, float_of
from protocol.pseudogradient.scanning import BLOCK_ELEMENTS, UNRANKED, UNRANKED_BITS
from protocol.pseudogradient.visibility import MAX_RANK, S, W, exact_rank, exact_value, grid_value, view_of


@kernel()
def locate_entries(
    base: Any, form: Any, bare: Any, classes: Any, gaps: Any, changes: Any, cursor: Any, block: Any
) -> Any:
    """Find the entries of a block; return their number.

    Args:
        base: bit patterns of the weights: uint32 [n].
        bare: size of the entries that `complete` needs to know, or 0.
        block: words, entries and masks of `scanning.BlockScratch`; result: places and weights of the entries, the
            entries, and which elements of each vector have a bare one.
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    words, entries, masks = block
    count = U(0)
    for vector in range(base.size // VECTOR_SIZE):
        begin, bare_ones = U(vector) * U(VECTOR_SIZE), U(0)
        pending = count_classes(base, begin, shift, mask, first, last, classes, gaps)  # that have an entry here
        while pending != U(0):
            own = lowest_bit(pending)
            pending &= pending - U(1)
            members = class_mask(classes, own)
            number, size = U(cursor[own + U(1)]), I(popcount(members))
            index, change = gaps[own] + size, changes[number]
            while index < size:
                place = nth_one(members, U(index))
                words[0, count] = begin + place
                words[1, count] = base[begin + place]
                entries[count] = change
                bare_ones |= U(change & U(0xFFFFFFFF) == bare) << place
                count += U(1)
                number += U(1)
                change = changes[number]
                index += I(1) + I(change >> U(33))
            cursor[own + U(1)] = I(number)
            gaps[own] = index - size
        masks[vector] = bare_ones
    return count


@kernel()
def compute_values(words: Any, entries: Any, count: Any, grid: Any) -> Any:
    """Compute the values of a block's entries; return how many are out of range.

    An exact value without a rank becomes 0, or -0 if it is negative.
    """
    weights, values, wrong = words[1], words[2], W(0)
    if grid[2] != U(0):
        for i in range(count):
            size, flag = W(entries[i] & U(0xFFFFFFFF)), W(entries[i] >> U(32)) & W(1)
            rank = S(W(W(min(size, W(MAX_RANK)) - W(UNRANKED + 1)) << W(1)) | flag)
            value, fits = exact_value(weights[i], rank)
            infinite = S(W(value & W(INFINITE)) == W(INFINITE))
            has_rank = size != W(UNRANKED)
            values[i] = value if has_rank else W(flag << W(31))
            wrong += W(has_rank & ((fits == S(0)) | (infinite != S(0))))
    else:
        floor, fraction = W(grid[0]), W(grid[1])
        for i in range(count):
            size, flag = W(entries[i] & U(0xFFFFFFFF)), W(entries[i] >> U(32)) & W(1)
            rank = S(W(W(min(size, W(MAX_RANK)) - W(1)) << W(1)) | flag)
            value, fits = grid_value(weights[i], rank, floor, fraction)
            values[i] = value
            wrong += W((fits == S(0)) | (W(value & W(INFINITE)) == W(INFINITE)))
    return wrong


@kernel()
def complete(base: Any, masks: Any, unranked: Any, state: Any, values: Any) -> Any:
    """Put the exact values of a block that have no rank in their places, in the order of the elements; return a status.

    Args:
        base: bit patterns of the block's weights: uint32 [n].
        masks: which elements of each vector have such a value: uint64.
        unranked: their bits, followed by at least two integers: uint32.
        state: the number of the next bit, and how many values remain: uint64[2].
        values: bit patterns of the block's values, which have the sign already: uint32 [n].
    """
    bits, remaining, in_range, visible = state[0], state[1], True, True
    for vector in range(base.size // VECTOR_SIZE):
        rest = masks[vector]
        if U(popcount(rest)) > remaining:
            return I(CUT_OFF)
        remaining -= U(popcount(rest))
        while rest != U(0):
            at = U(vector) * U(VECTOR_SIZE) + lowest_bit(rest)
            rest &= rest - U(1)
            magnitude, bits = get_bits(unranked, bits, U(UNRANKED_BITS))
            value = W(values[at] | W(magnitude))
            values[at] = value
            in_range = in_range and W(magnitude) < W(INFINITE) and exact_rank(base[at], value) < S(0)
            new_weight = bits_of_float(float_of(base[at]) - float_of(value))
            visible = visible and view_of(new_weight) != view_of(base[at])
    state[0], state[1] = bits, remaining
    if not in_range:
        return I(LEAVES_DTYPE)
    return I(0) if visible else I(LEAVES_CLASS)


def place(
    base: Any,
    form: Any,
    grid: Any,
    changes: Any,
    cursor: Any,
    gaps: Any,
    words: Any,
    entries: Any,
    masks: Any,
    classes: Any,
    unranked: Any,
    state: Any,
    squares: Any,
    out: Any,
) -> Any:
    """Write the values of a multiple of 64 elements to their places, and zeros elsewhere; return a status.

    Args:
        base: bit patterns of the weights: uint32 [n].
        form, grid: see `scanning.scan`.
        changes: decoded entries by class (`protocol.patch.entropy_decoding.get_changes`).
        cursor: index of the next entry of each group: int64[GROUPS].
        gaps: number of elements of each class before its next entry: int64[MAX_CLASSES].
        words, entries, masks, classes: see `scanning.BlockScratch`.
        unranked, state: see `complete`.
        squares: the sums of the squares of the values (`arithmetic.SquaredNorm`), which are updated: float64[8].
        out: result: float32 [n].
    """
    bare, status = U(UNRANKED) if grid[2] != U(0) else U(0), I(0)
    for start in range(0, base.size, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, base.size)
        own, values = base[start:end], out[start:end]
        bits = values.view(np.uint32)
        for i in range(bits.size):
            bits[i] = W(0)
        count = locate_entries(own, form, bare, classes, gaps, changes, cursor, (words, entries, masks))
        if compute_values(words, entries, count, grid) != W(0):
            status = I(LEAVES_DTYPE)
        for i in range(count):
            bits[words[0, i]] = words[2, i]
        if bare != U(0):
            answer = complete(own, masks, unranked, state, bits)
            status = answer if answer != I(0) else status
        if status != I(0):
            break
        for vector in range(values.size // VECTOR_SIZE):
            add_squares(values, U(vector) * U(VECTOR_SIZE), squares)
    return status


@cache
def placer() -> Callable[..., int]:
    """Compile `place`, or load it from numba's cache."""
    words, byte, unsigned, integers = "uint32[::1]", "uint8[::1]", "uint64[::1]", "int64[::1]"
    scratch = ("uint32[:, ::1]", unsigned, unsigned, byte)
    results = (unsigned, "float64[::1]", "float32[::1]")
    return kernel(words, unsigned, unsigned, unsigned, integers, integers, *scratch, words, *results)(place)
