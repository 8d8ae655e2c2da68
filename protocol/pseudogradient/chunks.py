"""SparseLoCo's kernels: the largest entries of each chunk of a tensor (docs/spec/pseudogradient.md, section 6).

A tensor of two or more dimensions is a matrix of its first dimension and all others; it is cut into blocks of 64 x 64
elements, row by row of blocks. Other tensors are cut into runs of 4096. The last blocks may be smaller. Elements of a
chunk are numbered row by row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

from protocol.kernels.jit import kernel
from protocol.kernels.simd import highest_bit, lowest_bit, popcount
from protocol.patch.entropy_decoding import CUT_OFF, PAST_THE_END, get_bits
from protocol.patch.entropy_encoding import put_bits
from protocol.patch.rans import I, U
from protocol.pseudogradient.bit_patterns import at_least_mask, bits_of_float
from protocol.pseudogradient.subsets import CHUNK, join, split
from protocol.pseudogradient.visibility import W

SIDE: Final = 64
LEVEL_BITS: Final = 2
LEVELS: Final = 1 << LEVEL_BITS
BRACKET: Final = 0x00080000
"""A chunk's threshold is looked for first within a sixteenth of an octave of that of the chunk before it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a tensor is cut into chunks.

    Attributes:
        rows, columns: of the matrix.
        height, width: of a chunk that is not at an edge.
    """

    rows: int
    columns: int
    height: int
    width: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.rows // self.height) * -(-self.columns // self.width)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The attributes, as kernels take them."""
        return self.rows, self.columns, self.height, self.width


def blocks_of(shape: Sequence[int]) -> Blocks:
    """Return how a tensor of a shape with at least one element is cut."""
    if len(shape) < 2:
        return Blocks(1, prod(shape), 1, CHUNK)
    return Blocks(shape[0], prod(shape[1:]), SIDE, SIDE)


@kernel()
def chosen_of(size: Any, chosen: Any) -> Any:
    """Return how many elements of a chunk of `size` are sent, where `chosen` are of a whole one."""
    return max(I(1), I(chosen) * I(size) // I(CHUNK))


@kernel()
def level_of(size: Any) -> Any:
    """Return log2 of the smallest power of two that is at least `size`."""
    level = I(0)
    while (I(1) << level) < size:
        level += I(1)
    return level


@kernel()
def count_at_least(magnitudes: Any, size: Any, least: Any) -> Any:
    """Count the magnitudes that reach a number; they are followed by zeros up to a multiple of 64."""
    count = I(0)
    for word in range((size + I(63)) >> I(6)):
        count += I(popcount(at_least_mask(magnitudes, U(word) << U(6), W(least))))
    return count


@kernel()
def threshold_of(magnitudes: Any, size: Any, chosen: Any, guess: Any) -> Any:
    """Return the largest number that at least `chosen` magnitudes reach, or one that exactly `chosen` reach: uint32.

    No number below 1 is tried. The next number lies where a straight line through the counts of the two borders has
    `chosen`, as long as that halves the distance in two steps, and otherwise in the middle.

    Args:
        guess: the result for the chunk before, or 0.
    """
    low, high, many, few = U(0), U(1) << U(32), size, I(0)
    probe, reach, step = max(U(guess), U(1)), U(BRACKET), I(0)
    before = high - low
    while high - low > U(1):
        count = count_at_least(magnitudes, size, probe)
        if count >= chosen:
            low, many = probe, count
        else:
            high, few = probe, count
        if count == chosen:
            high = low
        step += I(1)
        if low == U(0) and high > reach:  # look for a border near the guess
            probe, reach = high - reach, reach << U(2)
        elif high == U(1) << U(32) and low + reach < high:
            probe, reach = low + reach, reach << U(2)
        elif step & I(1) == I(0) and (high - low) > before >> U(1):
            probe = (low + high) >> U(1)
        else:
            probe = low + U(I(high - low) * (many - chosen) // max(I(1), many - few))
        if step & I(1) == I(0):
            before = high - low
        probe = min(max(probe, low + U(1)), high - U(1))
    return W(low)


@kernel()
def take_values(update: Any, begin: Any, columns: Any, wide: Any, bitmap: Any, values: Any, number: Any) -> Any:
    """Append the chosen values of a chunk to those before; return their number.

    Args:
        begin: index of the chunk's first element; wide: elements of one of its rows.
    """
    row_at, row_end = begin, wide
    for word in range(CHUNK // 64):
        rest = bitmap[word]
        while rest != U(0):
            place = I(word * 64) + I(lowest_bit(rest))
            rest &= rest - U(1)
            while place >= row_end:
                row_at, row_end = row_at + columns, row_end + wide
            values[number] = update[U(row_at + wide - row_end + place)]
            number += I(1)
    return number


def select(
    update: Any,
    rows: Any,
    columns: Any,
    height: Any,
    width: Any,
    chosen: Any,
    magnitudes: Any,
    bitmaps: Any,
    values: Any,
) -> Any:
    """Choose the largest entries of each chunk; of equal ones, those that come first. Return their number.

    Args:
        update: the tensor, flat: float32.
        rows, columns, height, width: see `Blocks`.
        chosen: entries of a whole chunk.
        magnitudes: scratch memory: uint32[CHUNK].
        bitmaps: result: which elements of each chunk are chosen: uint64[chunks, CHUNK / 64]; zeros before.
        values: result: their values, chunk by chunk in ascending order of elements: float32.
    """
    number, chunk, guess = I(0), I(0), W(0)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            high, wide = min(I(height), rows - top), min(I(width), columns - left)
            size = high * wide
            for row in range(high):
                source, target = (top + row) * columns + left, row * wide
                own, magnitudes_of_row = update[source : source + wide], magnitudes[target : target + wide]
                for column in range(own.size):
                    magnitudes_of_row[column] = W(bits_of_float(own[column]) & W(0x7FFFFFFF))
            for i in range(size, (size + I(63)) & ~I(63)):
                magnitudes[i] = W(0)
            entry_count = chosen_of(size, chosen)
            guess = threshold_of(magnitudes, size, entry_count, guess)
            surplus = -entry_count
            for word in range((size + I(63)) >> I(6)):
                mask = at_least_mask(magnitudes, U(word) << U(6), guess)
                if (I(word) + I(1)) << I(6) > size:
                    mask &= (U(1) << U(size & I(63))) - U(1)
                bitmaps[chunk, word] = mask
                surplus += I(popcount(mask))
            for reverse in range(CHUNK // 64):  # the last of equal ones are dropped
                word = CHUNK // 64 - 1 - reverse
                rest = bitmaps[chunk, word]
                while surplus > I(0) and rest != U(0):
                    place = highest_bit(rest)
                    rest ^= U(1) << place
                    if magnitudes[U(word * 64) + place] == guess:
                        bitmaps[chunk, word] ^= U(1) << place
                        surplus -= I(1)
            number = take_values(update, top * columns + left, columns, wide, bitmaps[chunk], values, number)
            chunk += I(1)
    return number


def split_chunks(
    update: Any,
    bounds: Any,
    chosen: Any,
    offsets: Any,
    slots: Any,
    bitmaps: Any,
    levels: Any,
    lookup: Any,
    sent: Any,
    sums: Any,
    nodes: Any,
    codes: Any,
    raw: Any,
    filled: Any,
    done: Any,
) -> Any:
    """List the symbols of some chunks, write their raw bits, and subtract what is sent; return the number of symbols.

    Args:
        update: the tensor, flat, from which the sent values are subtracted: float32.
        bounds: rows, columns, height and width of `Blocks`, the first chunk and the one behind the last: int64[6].
        levels: the level of each value: uint8.
        lookup: the value of each level: float32[LEVELS].
        sent: result: the sent values, flat: float32; zeros before.
        sums, nodes: see `subsets.split`.
        done: how many values were coded before: int64[1].
    """
    rows, columns, height, width = bounds[0], bounds[1], bounds[2], bounds[3]
    across, symbols, number = (columns + width - I(1)) // width, I(0), U(done[0])
    for chunk in range(bounds[4], bounds[5]):
        top, left = I(chunk) // across * height, I(chunk) % across * width
        high, wide = min(height, rows - top), min(width, columns - left)
        count, depth = chosen_of(high * wide, chosen), level_of(high * wide)
        bitmap = bitmaps[chunk]
        symbols += split(bitmap, depth, count, offsets, slots, sums, nodes, codes[symbols:], raw, filled)
        position, pending, fill = filled[0], filled[1], filled[2]
        row_at, row_end = top * columns + left, wide
        for word in range(CHUNK // 64):
            rest = bitmap[word]
            while rest != U(0):
                place = I(word * 64) + I(lowest_bit(rest))
                rest &= rest - U(1)
                while place >= row_end:
                    row_at, row_end = row_at + columns, row_end + wide
                level = levels[number]
                number += U(1)
                position, pending, fill = put_bits(raw, position, pending, fill, U(level), U(LEVEL_BITS))
                at = U(row_at + wide - row_end + place)
                update[at] = update[at] - lookup[level]
                sent[at] = lookup[level]
        filled[0], filled[1], filled[2] = position, pending, fill
    done[0] = I(number)
    return symbols


def join_chunks(
    bounds: Any,
    chosen: Any,
    offsets: Any,
    slots: Any,
    lookup: Any,
    nodes: Any,
    words: Any,
    raw: Any,
    state: Any,
    bitmap: Any,
    out: Any,
) -> Any:
    """Decode some chunks, the inverse of `split_chunks`; return a status.

    Args:
        words, raw, state: see `subsets.join`.
        bitmap: scratch memory: uint64[CHUNK / 64].
        out: the tensor's values, flat: float32; zeros before.
    """
    rows, columns, height, width = bounds[0], bounds[1], bounds[2], bounds[3]
    across, status = (columns + width - I(1)) // width, I(0)
    last_bit = (U(raw.size) - U(2)) << U(5)
    for chunk in range(bounds[4], bounds[5]):
        top, left = I(chunk) // across * height, I(chunk) % across * width
        high, wide = min(height, rows - top), min(width, columns - left)
        for word in range(CHUNK // 64):
            bitmap[word] = U(0)
        count = chosen_of(high * wide, chosen)
        answer = join(level_of(high * wide), count, offsets, slots, nodes, words, raw, state, bitmap)
        bits = state[2]
        if answer != I(0) or bits + U(LEVEL_BITS * count) > last_bit:
            status = I(CUT_OFF)
            break
        for word in range(CHUNK // 64):
            rest = bitmap[word]
            while rest != U(0):
                place = I(word * 64) + I(lowest_bit(rest))
                rest &= rest - U(1)
                level, bits = get_bits(raw, bits, U(LEVEL_BITS))
                if place >= high * wide:
                    status = I(PAST_THE_END)
                else:
                    out[(top + place // wide) * columns + left + place % wide] = lookup[level]
        state[2] = bits
    return status


@dataclass(frozen=True, slots=True)
class ChunkCoders:
    """The kernels of this module."""

    select: Callable[..., int]
    split_chunks: Callable[..., int]
    join_chunks: Callable[..., int]


@cache
def chunk_coders() -> ChunkCoders:
    """Compile the kernels, or load them from numba's cache."""
    floats, words, unsigned, byte = "float32[::1]", "uint32[::1]", "uint64[::1]", "uint8[::1]"
    integers, maps = "int64[::1]", "uint64[:, ::1]"
    tables = (integers, "int64", "int64[:, ::1]", words)
    rows = ("int64",) * 5
    return ChunkCoders(
        select=kernel(floats, *rows, words, maps, floats)(select),
        split_chunks=kernel(
            floats, *tables, maps, byte, floats, floats, integers, unsigned, "uint32[:, ::1]", words, unsigned, integers
        )(split_chunks),
        join_chunks=kernel(*tables, floats, unsigned, words, words, unsigned, unsigned, floats)(join_chunks),
    )
