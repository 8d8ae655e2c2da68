"""Frames of exact and of grid values: the decoder, which mirrors scanning.py and sparse_encoding.py.

The bytes may be hostile. The number of entries in a block is at most that of its elements, since each has a place of
its own; sizes are limited before they become ranks; and the raw bits are counted before they are read.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError, MalformedError
from protocol.kernels.jit import Int64Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import (
    VECTOR_SIZE,
    add_squares,
    bits_of_float,
    class_mask,
    count_classes,
    float_of,
    lowest_bit,
    nth_one,
    popcount,
)
from protocol.patch.context_model import Model, form_of, read_model
from protocol.patch.entropy_decoding import (
    CUT_OFF,
    LEAVES_DTYPE,
    LEFT_OVER,
    PAST_THE_END,
    UNCHANGED_VIEW,
    get_bits,
    reasons,
)
from protocol.patch.entropy_encoding import GROUPS
from protocol.patch.fields import Cursor
from protocol.patch.rans import I, U
from protocol.patch.sparse import CHUNK_ELEMENTS, decode_changes
from protocol.pseudogradient.arithmetic import INFINITE, Floats, Lanes
from protocol.pseudogradient.scanning import BLOCK_ELEMENTS, UNRANKED, UNRANKED_BITS, BlockArrays, block_scratch
from protocol.pseudogradient.sparse_encoding import LAYOUT, MIN_FLOOR, WORDS, SparseCoding
from protocol.pseudogradient.visibility import MAX_RANK, S, W, exact_rank, exact_value, grid_value, view_of

_WHERE: Final = "sparse frame"
_reasons: Final = {**reasons, UNCHANGED_VIEW: "a value that changes no BF16 weight"}


@inlined
def locate_entries(
    base: UInt32Array,
    form: UInt64Array,
    bare: int,
    entry_list: tuple[UInt64Array, Int64Array, Int64Array],
    block: BlockArrays,
) -> Any:
    """Find the entries of a block; return their number. It gets their places and weights in words, the entries, and in
    masks which elements of each vector have a bare one: one of the size that `complete` needs to know, or 0. The base
    is bit patterns of the weights, uint32 [n]; for the others see `place`.
    """
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    (changes, cursor, gaps), (_, _, words, entries, masks, classes) = entry_list, block
    count = U(0)
    for vector in range(base.size // VECTOR_SIZE):
        begin, bare_ones = U(vector) * U(VECTOR_SIZE), U(0)
        # `pending` has a one for each class with an entry in this vector: one whose gap ends here.
        pending = count_classes(base, begin, shift, mask, first, last, classes, gaps)
        while pending != U(0):
            own = lowest_bit(pending)
            pending &= pending - U(1)
            members = class_mask(classes, own)
            # What was left of the gap before this vector is the index of the entry among the class's members here. The
            # gap behind a class's last entry is longer than any chunk.
            number, size = U(cursor[own]), I(popcount(members))
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
            cursor[own] = I(number)
            gaps[own] = index - size
        masks[vector] = bare_ones
    return count


@inlined
def compute_values(words: UInt32Array, entries: UInt64Array, count: int, grid: UInt64Array) -> Any:
    """Compute the values of a block's entries; return how many are out of range.

    An exact value without a rank becomes 0, or -0 if it is negative.
    """
    # Hostile sizes are cut to MAX_RANK, so that no sum overflows; that is out of range for each weight. Errors are
    # counted and not acted upon, so that the loops have no branches.
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


@inlined
def complete(
    base: UInt32Array, masks: UInt64Array, unranked: UInt32Array, state: UInt64Array, values: UInt32Array
) -> Any:
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
        # Counted before the first bit of the vector is read.
        if U(popcount(rest)) > remaining:
            return I(CUT_OFF)
        remaining -= U(popcount(rest))
        while rest != U(0):
            at = U(vector) * U(VECTOR_SIZE) + lowest_bit(rest)
            rest &= rest - U(1)
            magnitude, bits = get_bits(unranked, bits, U(UNRANKED_BITS))
            value = W(values[at] | W(magnitude))
            values[at] = value
            # A value that has a rank must come as one, and one that nobody sees must not come: a payload has one form.
            in_range = in_range and W(magnitude) < W(INFINITE) and exact_rank(base[at], value) < S(0)
            new_weight = bits_of_float(float_of(base[at]) - float_of(value))
            visible = visible and view_of(new_weight) != view_of(base[at])
    state[0], state[1] = bits, remaining
    if not in_range:
        return I(LEAVES_DTYPE)
    return I(0) if visible else I(UNCHANGED_VIEW)


@kernel
def place(
    base: UInt32Array,
    form: UInt64Array,
    grid: UInt64Array,
    entry_list: tuple[UInt64Array, Int64Array, Int64Array],
    block: BlockArrays,
    bits: tuple[UInt32Array, UInt64Array],
    squares: Lanes,
    out: Floats,
) -> Any:
    """Write the values of a multiple of 64 elements to their places, and zeros elsewhere; return a status.

    Args:
        base: bit patterns of the weights: uint32 [n].
        form, grid: see `scanning.scan`.
        entry_list: decoded entries by class (`protocol.patch.entropy_decoding.get_changes`): uint64; index of the next
            entry of each group: int64[GROUPS]; and number of elements of each class before its next entry:
            int64[MAX_CLASSES].
        block: see `scanning.block_scratch`.
        bits: the bits of the values without a rank, and the state of reading them: see `complete`.
        squares: the sums of the squares of the values (`arithmetic.SquaredNorm`), which are updated: float64[8].
        out: result: float32 [n].
    """
    (unranked, state), (_, _, words, entries, masks, _) = bits, block
    bare, status = U(UNRANKED) if grid[2] != U(0) else U(0), I(0)
    for start in range(0, base.size, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, base.size)
        own, values = base[start:end], out[start:end]
        # Zeros first, then the values of the block's entries over them.
        patterns = values.view(np.uint32)
        for i in range(patterns.size):
            patterns[i] = W(0)
        count = locate_entries(own, form, bare, entry_list, block)
        # The entries lie side by side, so ranks become values without a branch; then each goes to its place.
        if compute_values(words, entries, count, grid) != W(0):
            status = I(LEAVES_DTYPE)
        for i in range(count):
            patterns[words[0, i]] = words[2, i]
        if bare != U(0):
            answer = complete(own, masks, unranked, state, patterns)
            status = answer if answer != I(0) else status
        if status != I(0):
            break
        # While the block is in the cache; a block with an error has left the loop, so the norm is of sound values.
        for vector in range(values.size // VECTOR_SIZE):
            add_squares(values, U(vector) * U(VECTOR_SIZE), squares)
    return status


def decode_sparse(
    frame: memoryview, base: Floats, coding: SparseCoding, entries: int, squares: Lanes, out: Floats
) -> None:
    """Decode a part of hostile bytes. `base` are the shared weights, `out` gets the values, zeros where nothing was
    sent: float32 [n]; their squares are added to `squares`, see `SquaredNorm`. `entries` is the number that the head
    states. A ProtocolError says where the frame breaks docs/spec/pseudogradient.md.
    """
    # Without entries the weights are not looked at. With some, each chunk has its own model, and memory stays small.
    if not entries:
        if len(frame):
            raise MalformedError("bytes where nothing was sent", _WHERE)
        out[:] = 0
        return
    cursor, count, block = Cursor(frame, _WHERE), 0, block_scratch()
    for begin in range(0, base.size, CHUNK_ELEMENTS):
        end = min(begin + CHUNK_ELEMENTS, base.size)
        count += _decode_chunk(cursor, base[begin:end], coding, _Output(block, squares, out[begin:end]))
    cursor.finish()
    if count != entries:
        raise ContributionError(f"{count} entries in the chunks where the head says {entries}", _WHERE)


@dataclass(frozen=True, slots=True)
class _Output:
    """Where the values of a chunk go: float32 [n]; and the sums of the squares of all values."""

    block: BlockArrays
    squares: Lanes
    values: Floats


def _decode_chunk(cursor: Cursor, base: Floats, coding: SparseCoding, out: _Output) -> int:
    """Decode a chunk; return the number of its entries."""
    # Every number is bounded by the size of the chunk before it reserves memory or becomes an index.
    count = cursor.varint(base.size)
    if count == 0:
        out.values[:] = 0
        return 0
    reference = 0 if coding.exact else cursor.byte()
    if not coding.exact and not MIN_FLOOR + coding.fraction <= reference <= 254:
        raise MalformedError(f"a reference exponent of {reference}", _WHERE)
    model = read_model(cursor, LAYOUT)
    if not model.classes:
        raise MalformedError("a chunk without classes", _WHERE)
    counts = np.zeros(GROUPS, np.int64)
    for group in range(model.classes):
        counts[group] = cursor.varint(base.size)
    if int(counts.sum()) != count:
        raise ContributionError(f"{int(counts.sum())} entries in the classes of {count}", _WHERE)
    lengths = read_lengths(cursor, base.size)
    unranked = cursor.varint(count) if coding.exact else 0
    changes = decode_entries(cursor, model, counts, lengths, base.size)
    bits = cursor.take((UNRANKED_BITS * unranked + 7) // 8)
    # The bits that fill up the last byte are zeros: a payload has one form.
    if len(bits) and bits[-1] >> ((UNRANKED_BITS * unranked - 1) % 8 + 1):
        raise MalformedError("bits behind the last value without a rank", _WHERE)
    grid = np.array((reference, coding.fraction, coding.exact), np.uint64)
    forms = form_of(WORDS, model.first, model.classes), grid
    _place(base, forms, (changes, counts), (bits, unranked), out)
    return count


def read_lengths(cursor: Cursor, elements: int) -> tuple[int, int]:
    """Read the number of words and the bytes of raw bits of so many elements."""
    # Sections are no longer than the elements, which an encoder never exceeds.
    longest = 4 * elements + 512
    return cursor.varint(longest), cursor.varint(longest)


def decode_entries(
    cursor: Cursor, model: Model, counts: NDArray[np.int64], lengths: tuple[int, int], elements: int
) -> NDArray[np.uint64]:
    """Decode the entries of some elements, of which each group has so many; see `decode_changes`."""
    sections = cursor.take(2 * lengths[0]), cursor.take(lengths[1])
    status, changes = decode_changes(sections, model, counts, elements)
    _check(status)
    return changes


def _place(
    base: Floats,
    forms: tuple[NDArray[np.uint64], NDArray[np.uint64]],
    entries: tuple[NDArray[np.uint64], NDArray[np.int64]],
    unranked: tuple[bytes | memoryview, int],
    out: _Output,
) -> None:
    """Write the values to their places, by `form` and `grid` of `scanning.scan`, the entries of all classes with the
    number of each, and the bits of the values without a rank, with their number.
    """
    changes, counts = entries
    cursor = np.cumsum(counts + 1) - counts - 1
    ends = cursor + counts
    gaps = (changes[cursor] >> np.uint64(33)).astype(np.int64)
    bits = np.frombuffer(bytes(unranked[0]) + bytes(8 + -len(unranked[0]) % 4), "<u4").astype(np.uint32)
    position = np.array((0, unranked[1]), np.uint64)  # in the bits of values without a rank: read, remaining
    state = (*forms, (changes, cursor, gaps), out.block, (bits, position), out.squares)
    whole = base.size // VECTOR_SIZE * VECTOR_SIZE
    _check(place(base[:whole].view(np.uint32), *state, out.values[:whole]))
    if whole < base.size:
        # In a copy that is padded to a whole vector. A value in the padding would be one behind the end.
        tail, values = np.zeros(VECTOR_SIZE, np.float32), np.empty(VECTOR_SIZE, np.float32)
        tail[: base.size - whole] = base[whole:]
        _check(place(tail.view(np.uint32), *state, values))
        if values[base.size - whole :].any():
            raise ContributionError(_reasons[PAST_THE_END], _WHERE)
        out.values[whole:] = values[: base.size - whole]
    # Every entry was reached, and every value without a rank was used.
    if (cursor != ends).any():
        raise ContributionError(_reasons[PAST_THE_END], _WHERE)
    if position[1]:
        raise ContributionError(_reasons[LEFT_OVER], _WHERE)


def _check(status: int) -> None:
    if status:
        raise ContributionError(_reasons[status], _WHERE)
