"""SparseLoCo's kernels: the largest entries of each chunk of a tensor (docs/spec/pseudogradient.md, section 6).

Entries are packed like the changes of a patch, whose kernels code them: gap in the chunk | sign | 1 or 2 by the level.

A tensor of two or more dimensions is a matrix of its first dimension and all others; it is cut into chunks of 64 x 64
elements, row by row of chunks. Other tensors are cut into runs of 4096. The last chunks may be smaller. The *place* of
an element is its number in its chunk, row by row; its *index* is its number in the flat tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from protocol.kernels.jit import Int64Array, UInt8Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import at_least_mask, bits_of_float, highest_bit, lowest_bit, popcount
from protocol.patch.entropy_decoding import LEAVES_DTYPE, PAST_THE_END
from protocol.patch.rans import I, U
from protocol.pseudogradient.arithmetic import Floats
from protocol.pseudogradient.visibility import W

SIDE: Final = 64
CHUNK: Final = SIDE * SIDE
LEVELS: Final = 4
SIXTEENTH_OCTAVE: Final = 0x00080000
"""The difference of the bit patterns of two floats whose ratio is about 2^(1/16)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a tensor is cut into chunks."""

    rows: int  # of the matrix
    columns: int  # of the matrix
    height: int  # of a chunk that is not at an edge
    width: int  # of the same

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self.height) * -(-self.columns // self.width)

    def bounds(self, begin: int, end: int) -> Int64Array:
        """Return what kernels need to find the chunks from `begin` to before `end`: int64[6].

        These are the attributes, in their order, then `begin` and `end`.
        """
        return np.array((self.rows, self.columns, self.height, self.width, begin, end), np.int64)


def blocks_of(shape: Sequence[int]) -> Blocks:
    """Return how a tensor of a shape with at least one element is cut."""
    if len(shape) < 2:
        return Blocks(1, prod(shape), 1, CHUNK)
    return Blocks(shape[0], prod(shape[1:]), SIDE, SIDE)


class Area(NamedTuple):
    """The elements of one chunk."""

    begin: int  # index of its first element
    height: int  # number of its rows
    width: int  # number of its columns
    stride: int  # by how much the index grows from one row to the next


@inlined
def area_of(chunk: int, bounds: Int64Array) -> Area:
    """Return the elements of a chunk; see `Blocks.bounds`."""
    rows, columns, height, width = bounds[0], bounds[1], bounds[2], bounds[3]
    chunks_across = (columns + width - I(1)) // width
    top, left = I(chunk) // chunks_across * height, I(chunk) % chunks_across * width
    return Area(top * columns + left, min(height, rows - top), min(width, columns - left), columns)


@inlined
def advance_to(place: int, row_end: int, offset: int, area: Area) -> Any:
    """Go on from one row of a chunk to the row of a later place; return the place behind that row's last element, and
    what is added to a place in it for its index. For the first row they are the area's width and begin.

    In one row, index and place differ by the same number. So a pass over ascending places needs no division.
    """
    while place >= row_end:
        row_end, offset = row_end + area.width, offset + area.stride - area.width
    return row_end, offset


@inlined
def chosen_of(size: int, chosen: int) -> Any:
    """Return how many elements of a chunk of `size` are sent, where `chosen` are of a whole one: int64, at least 1."""
    return max(I(1), I(chosen) * I(size) // I(CHUNK))


@kernel
def count_entries(bounds: Int64Array, chosen: int) -> Any:
    """Return how many elements of some chunks are sent: int64; see `chosen_of`."""
    count = I(0)
    for chunk in range(bounds[4], bounds[5]):
        area = area_of(chunk, bounds)
        count += chosen_of(area.height * area.width, chosen)
    return count


@inlined
def count_at_least(magnitudes: UInt32Array, size: int, least: int) -> Any:
    """Count the magnitudes, uint32 [CHUNK], that reach a number above 0: int64. Zeros follow the first `size` of them
    up to a multiple of 64.
    """
    count = I(0)
    for word in range((size + I(63)) >> I(6)):
        count += I(popcount(at_least_mask(magnitudes, U(word) << U(6), W(least))))
    return count


@inlined
def threshold_of(magnitudes: UInt32Array, size: int, chosen: int, guess: int) -> Any:
    """Return a threshold that keeps the `chosen` largest magnitudes (see `count_at_least`), which are bit patterns of
    floats without the sign, and so in their order: uint32. `guess` is the threshold of the chunk before, or 0.

    It is a number that exactly `chosen` magnitudes reach or, if equal magnitudes leave no such number, the largest one
    that more of them reach. It is found by bisection: a pass over a chunk in the cache costs less than a sort.
    """
    # At every step, at least `chosen` magnitudes reach `low`, and fewer reach `high`, which begins above all of them.
    low, high, count_low, count_high = U(0), U(1) << U(32), size, I(0)
    # 0 is never tried: the zeros behind the last magnitude would reach it.
    probe, jump, step = max(U(guess), U(1)), U(SIXTEENTH_OCTAVE), I(0)
    distance = high - low
    while high - low > U(1):
        count = count_at_least(magnitudes, size, probe)
        if count >= chosen:
            low, count_low = probe, count
        else:
            high, count_high = probe, count
        if count == chosen:
            high = low
        step += I(1)
        if low == U(0) and high > jump:
            # The threshold is below the guess: jump down, four times as far each time, until a border is below it too.
            probe, jump = high - jump, jump << U(2)
        elif high == U(1) << U(32) and low + jump < high:
            # The threshold is above the guess: the same upwards.
            probe, jump = low + jump, jump << U(2)
        elif step & I(1) == I(0) and (high - low) > distance >> U(1):
            # The last two steps did not halve the distance, so this one does: the number of steps is bounded.
            probe = (low + high) >> U(1)
        else:
            # A straight line through the counts of the two borders has the count `chosen` here.
            probe = low + U(I(high - low) * (count_low - chosen) // max(I(1), count_low - count_high))
        if step & I(1) == I(0):
            distance = high - low
        probe = min(max(probe, low + U(1)), high - U(1))
    return W(low)


@inlined
def drop_surplus(bitmap: UInt64Array, magnitudes: UInt32Array, threshold: int, surplus: int) -> Any:
    """Remove the last `surplus` elements whose magnitude is the threshold from those that a bitmap chooses."""
    # Backwards, because of equal magnitudes the first ones stay.
    for reverse in range(CHUNK // 64):
        word = CHUNK // 64 - 1 - reverse
        rest = bitmap[word]
        while surplus > I(0) and rest != U(0):
            place = highest_bit(rest)
            rest ^= U(1) << place
            if magnitudes[U(word * 64) + place] == threshold:
                bitmap[word] ^= U(1) << place
                surplus -= I(1)
    return I(0)


@inlined
def take_values(update: Floats, area: Area, bitmap: UInt64Array, values: Floats, count: int) -> Any:
    """Append the values of a chunk's chosen elements to the first `count`, in ascending order of places; return the new
    number of values. The flat tensor is float32 [n]; the bitmap has a one for each place whose element is chosen:
    uint64 [CHUNK / 64].
    """
    row_end, offset = area.width, area.begin
    for word in range(CHUNK // 64):
        rest = bitmap[word]
        while rest != U(0):
            place = I(word * 64) + I(lowest_bit(rest))
            rest &= rest - U(1)
            row_end, offset = advance_to(place, row_end, offset, area)
            values[count] = update[U(offset + place)]
            count += I(1)
    return count


@kernel
def select(
    update: Floats, bounds: Int64Array, chosen: int, magnitudes: UInt32Array, bitmaps: UInt64Array, values: Floats
) -> Any:
    """Choose the largest entries of each chunk; of equal ones, those that come first. Return their number: int64.

    Args:
        update: the tensor, flat: float32 [n].
        bounds: of all of its chunks: see `Blocks.bounds`.
        chosen: entries of a whole chunk.
        magnitudes: scratch memory: uint32 [CHUNK].
        bitmaps: result: a one for each place whose element is chosen: uint64 [chunks, CHUNK / 64]; zeros before.
        values: result: the chosen values, chunk by chunk in ascending order of places: float32 [entries].
    """
    number, guess = I(0), W(0)
    for chunk in range(bounds[4], bounds[5]):
        area = area_of(chunk, bounds)
        size = area.height * area.width
        # The chunk's magnitudes side by side: bit patterns without the sign, followed by zeros to fill the last vector.
        for row in range(area.height):
            source, target = area.begin + row * area.stride, row * area.width
            values_of_row = update[source : source + area.width]
            magnitudes_of_row = magnitudes[target : target + area.width]
            for column in range(values_of_row.size):
                magnitudes_of_row[column] = W(bits_of_float(values_of_row[column]) & W(0x7FFFFFFF))
        for place in range(size, (size + I(63)) & ~I(63)):
            magnitudes[place] = W(0)
        # Everything that reaches the threshold is chosen, which may be too much if several magnitudes are equal to it.
        entry_count = chosen_of(size, chosen)
        guess = threshold_of(magnitudes, size, entry_count, guess)
        surplus = -entry_count
        for word in range((size + I(63)) >> I(6)):
            mask = at_least_mask(magnitudes, U(word) << U(6), guess)
            if (I(word) + I(1)) << I(6) > size:
                # A threshold of 0 would choose the zeros behind the last element as well.
                mask &= (U(1) << U(size & I(63))) - U(1)
            bitmaps[chunk, word] = mask
            surplus += I(popcount(mask))
        drop_surplus(bitmaps[chunk], magnitudes, guess, surplus)
        number = take_values(update, area, bitmaps[chunk], values, number)
    return number


@kernel
def list_chunks(
    update: Floats,
    sent: Floats,
    bounds: Int64Array,
    entries: tuple[UInt64Array, UInt8Array, Floats],
    changes: UInt64Array,
) -> Any:
    """List the entries of some chunks, and subtract what is sent; return the number of entries.

    Args:
        update: the tensor, flat, from which the sent values are subtracted: float32 [n].
        sent: result: the sent values, flat: float32 [n]; zeros before.
        bounds: of these chunks: see `Blocks.bounds`.
        entries: the bitmaps of all chunks; the level of each value of these: uint8; and the value of each level:
            float32 [LEVELS].
        changes: result: packed entries: uint64.
    """
    (bitmaps, levels, lookup), number = entries, U(0)
    for chunk in range(bounds[4], bounds[5]):
        area, bitmap, before = area_of(chunk, bounds), bitmaps[chunk], I(-1)
        row_end, offset = area.width, area.begin
        for word in range(CHUNK // 64):
            rest = bitmap[word]
            while rest != U(0):
                place = I(word * 64) + I(lowest_bit(rest))
                rest &= rest - U(1)
                row_end, offset = advance_to(place, row_end, offset, area)
                # The levels 1 and 3 have nearly all values: their size is 1, that of the two others is 2.
                level = U(levels[number])
                changes[number] = U(place - before - I(1)) << U(33) | level >> U(1) << U(32) | U(2) - (level & U(1))
                number += U(1)
                before = place
                # What the receiver decodes is subtracted, not the exact value: the rest is the error feedback.
                index = U(offset + place)
                update[index] = update[index] - lookup[level]
                sent[index] = lookup[level]
    return I(number)


@kernel
def place_chunks(bounds: Int64Array, chosen: int, changes: UInt64Array, lookup: Floats, out: Floats) -> Any:
    """Write the values of some chunks to their places, the inverse of `list_chunks`; return a status.

    Args:
        bounds, chosen: see `select`.
        changes: as many decoded entries as the chunks have (`protocol.patch.entropy_decoding.get_changes`): uint64.
        lookup: the value of each level: float32 [LEVELS].
        out: result: the tensor's values, flat: float32 [n]; zeros before.
    """
    number = U(0)
    for chunk in range(bounds[4], bounds[5]):
        area, place = area_of(chunk, bounds), I(-1)
        size, row_end, offset = area.height * area.width, area.width, area.begin
        for _ in range(chosen_of(size, chosen)):
            change = changes[number]
            number += U(1)
            place += I(1) + I(change >> U(33))
            # A hostile gap could lead out of the chunk, into elements of others.
            if place >= size:
                return I(PAST_THE_END)
            # Sign and size are the two bits of the level; there are only sizes of 1 and 2.
            if change & U(0xFFFFFFFF) > U(2):
                return I(LEAVES_DTYPE)
            row_end, offset = advance_to(place, row_end, offset, area)
            out[U(offset + place)] = lookup[(change >> U(32) & U(1)) << U(1) | change & U(1)]
    return I(0)
