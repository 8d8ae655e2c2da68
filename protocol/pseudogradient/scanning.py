"""The encoder's kernel: gate the elements of a chunk, and collect its entries by class.

Entries are packed like the changes of a patch (protocol/patch/entropy_encoding.py), so the patch codec's kernels sort,
count and code them: size: 32 bits | flag | gap: 21 bits | class. The flag travels as a raw bit. A value of rank r
has flag r % 2, and size r // 2 + 1 on a grid, or r // 2 + 2 for exact values. An exact value without a rank has size 1,
and its sign as its flag; its 31 other bits travel apart, in the order of the elements.

The kernel takes a block of elements at a time, so that what lies between its passes stays in the cache.
"""

from typing import Any, Final

import numpy as np

from protocol.kernels.jit import Int64Array, UInt8Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import (
    MAX_CLASSES,
    VECTOR_SIZE,
    add_squares,
    bits_of_float,
    class_mask,
    count_classes,
    lowest_bit,
    popcount,
    true_mask,
)
from protocol.patch.entropy_encoding import put_bits
from protocol.patch.rans import I, U
from protocol.pseudogradient.arithmetic import INFINITE, Floats, Lanes
from protocol.pseudogradient.visibility import MAX_STEPS, ROUNDER, F, S, W, exact_rank, grid_rank, grid_step, view_of

BLOCK_ELEMENTS: Final = 1 << 12
"""Elements that a kernel takes at a time, of 64 vectors."""

UNRANKED_BITS: Final = 31
"""Raw bits of an exact value without a rank."""

UNRANKED: Final = 1
"""Its size."""

NOT_FINITE: Final = -1
"""Status of the kernel: an update is infinite or NaN."""


BlockArrays = tuple[Floats, UInt8Array, UInt32Array, UInt64Array, UInt64Array, UInt8Array]


def block_scratch() -> BlockArrays:
    """Return the memory of the kernels for the elements of one block.

    Returns:
        floats: what is sent, zeros elsewhere: float32 [BLOCK_ELEMENTS].
        flags: 1 where an entry is sent: uint8 [BLOCK_ELEMENTS].
        words: for each entry its place, its weight and its value (bit patterns), and its rank:
            uint32 [4, BLOCK_ELEMENTS].
        entries: packed entries: uint64 [BLOCK_ELEMENTS].
        masks: a mask for each vector: uint64 [BLOCK_ELEMENTS / VECTOR_SIZE].
        classes: the classes of the elements of a vector: uint8 [VECTOR_SIZE].
    """
    floats, flags = np.empty(BLOCK_ELEMENTS, np.float32), np.empty(BLOCK_ELEMENTS, np.uint8)
    words, entries = np.empty((4, BLOCK_ELEMENTS), np.uint32), np.empty(BLOCK_ELEMENTS, np.uint64)
    masks, classes = np.empty(BLOCK_ELEMENTS // VECTOR_SIZE, np.uint64), np.empty(VECTOR_SIZE, np.uint8)
    return floats, flags, words, entries, masks, classes


@inlined
def gate_exact(
    base: Floats, local: Floats, feedback: Floats, decay: Any, values: Floats, residual: Floats, flags: UInt8Array
) -> Any:
    """Choose the entries that are sent as exact values; return how many updates are not finite. `values` gets what is
    sent, zeros elsewhere, and `residual` the error feedback after sending: float32 [n], as the inputs; `flags` is 1
    where the entry is sent: uint8 [n].
    """
    # No branches, so that the loop is compiled to SIMD: all results are computed, and selected by `visible`.
    infinite = W(0)
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        visible = view_of(bits_of_float(weight - update)) != view_of(bits_of_float(weight))
        values[i] = update if visible else F(0)
        residual[i] = F(0) if visible else update
        flags[i] = visible
        infinite += W(W(bits_of_float(update) & W(INFINITE)) == W(INFINITE))
    return infinite


@inlined
def gate_grid(
    base: Floats,
    local: Floats,
    feedback: Floats,
    decay: Any,
    floor: Any,
    fraction: Any,
    values: Floats,
    residual: Floats,
    flags: UInt8Array,
) -> Any:
    """Choose the entries that are sent as values on the grid; see `gate_exact` and `grid_step`.

    A value is not sent if float32 cannot hold what would remain: then an update is 2^46 times the others.
    """
    infinite = W(0)
    for i in range(base.size):
        weight = base[i]
        update = decay * feedback[i] + (weight - local[i])
        bits = bits_of_float(weight)
        # The nearest whole number of steps, ties to even: the sum with ROUNDER has no bits behind the point.
        step, per_step = grid_step(bits, floor, fraction)
        scaled = min(max(update * per_step, F(-MAX_STEPS)), F(MAX_STEPS))
        value = ((scaled + F(ROUNDER)) - F(ROUNDER)) * step
        # The receiver changes its weight by `value`. What it does not get must come back exactly, next time.
        rest = update - value
        visible = (view_of(bits_of_float(weight - value)) != view_of(bits)) & (update - rest == value)
        values[i] = value if visible else F(0)
        residual[i] = rest if visible else update
        flags[i] = visible
        infinite += W(W(bits_of_float(update) & W(INFINITE)) == W(INFINITE))
    return infinite


@inlined
def gate_block(
    inputs: tuple[Floats, Floats, Floats],
    begin: int,
    end: int,
    decay: Any,
    grid: UInt64Array,
    residual: Floats,
    block: BlockArrays,
) -> Any:
    """Gate elements into the block's floats and flags (`gate_exact`, `scan`); return how many are not finite."""
    base, local, feedback = inputs[0][begin:end], inputs[1][begin:end], inputs[2][begin:end]
    values, flags = block[0][: end - begin], block[1][: end - begin]
    if grid[2] != U(0):
        return gate_exact(base, local, feedback, decay, values, residual, flags)
    floor, fraction = W(grid[0]), W(grid[1])
    return gate_grid(base, local, feedback, decay, floor, fraction, values, residual, flags)


@kernel
def sample(
    inputs: tuple[Floats, Floats, Floats],
    decay: Any,
    grid: UInt64Array,
    residual: Floats,
    block: BlockArrays,
    counts: Int64Array,
) -> Any:
    """Count the entries of any number of elements, and the elements, by the exponents of their weights: int64[2, 256].
    The other arguments are as for `scan`; `residual` is scratch memory, float32 [BLOCK_ELEMENTS].
    """
    base, flags = inputs[0], block[1]
    for start in range(0, base.size, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, base.size)
        # The same gate as for the frame, of which only the flags are used: so the sample is true.
        gate_block(inputs, start, end, decay, grid, residual[: end - start], block)
        for i in range(end - start):
            exponent = W(bits_of_float(base[start + i]) >> W(23)) & W(0xFF)
            counts[0, exponent] += I(flags[i])
            counts[1, exponent] += I(1)
    return 0


@inlined
def list_entries(base: UInt32Array, form: UInt64Array, block: BlockArrays, gaps: Int64Array, counts: Int64Array) -> Any:
    """List the entries of a block in the order of its elements; return their number. The block's floats and flags say
    what is sent; it gets weights and values in words, packed gaps and classes in entries. The base is bit patterns of
    the weights, uint32 [n]; for the others see `scan`.
    """
    values, flags, words, entries, _, classes = block
    shift, mask, first, last = form[0], form[1], form[2], form[3]
    number = U(0)
    for vector in range(base.size // VECTOR_SIZE):
        begin = U(vector) * U(VECTOR_SIZE)
        rest = true_mask(flags, begin)
        count_classes(base, begin, shift, mask, first, last, classes, gaps)
        while rest != U(0):
            place = lowest_bit(rest)
            rest &= rest - U(1)
            # As `entropy_encoding.scan` does for changes.
            own = U(classes[place])
            members = class_mask(classes, own)
            inside, earlier = I(popcount(members)), I(popcount(members & ((U(1) << place) - U(1))))
            gap = U(earlier - inside - gaps[own])
            gaps[own] = earlier + I(1) - inside
            counts[own] += I(1)
            words[1, number] = base[begin + place]
            words[2, number] = bits_of_float(values[begin + place])
            entries[number] = gap << U(33) | own << U(54)
            number += U(1)
    return number


@inlined
def rank_entries(words: UInt32Array, count: int, grid: UInt64Array) -> Any:
    """Compute the ranks of a block's entries; see `block_scratch`. An exact value without a rank gets -1."""
    weights, values, ranks = words[1], words[2], words[3]
    if grid[2] != U(0):
        for i in range(count):
            ranks[i] = W(exact_rank(weights[i], values[i]))
    else:
        floor, fraction = W(grid[0]), W(grid[1])
        for i in range(count):
            ranks[i] = W(grid_rank(weights[i], values[i], floor, fraction))


@inlined
def put_unranked(words: UInt32Array, count: int, unranked: UInt32Array, filled: UInt64Array) -> Any:
    """Write the bits of a block's values without a rank, and replace ranks by what size and flag follow from."""
    # Afterwards words[3] is 2 * (size - 1) + flag of each entry: an unranked value has size 1, ranks begin at size 2.
    position, pending, fill = filled[0], filled[1], filled[2]
    for i in range(count):
        if S(words[3, i]) < S(0):
            value = words[2, i]
            words[3, i] = value >> W(31)
            bits = U(value) & U(0x7FFFFFFF)
            position, pending, fill = put_bits(unranked, position, pending, fill, bits, U(UNRANKED_BITS))
        else:
            words[3, i] += W(2 * UNRANKED)
    filled[0], filled[1], filled[2] = position, pending, fill


@kernel
def scan(
    inputs: tuple[Floats, Floats, Floats],
    decay: Any,
    form: UInt64Array,
    grid: UInt64Array,
    residual: Floats,
    block: BlockArrays,
    listing: tuple[UInt64Array, Int64Array, Int64Array],
    bits: tuple[UInt32Array, UInt64Array],
    squares: Lanes,
) -> Any:
    """Append the entries of a multiple of 64 elements; return the total number of entries, or NOT_FINITE.

    Args:
        inputs: base, local weights and error feedback before sending: float32 [n] each.
        decay: of the error feedback: float32.
        form: constants of the classes of uint32 bit patterns, see `protocol.patch.context_model.form_of`.
        grid: reference exponent or floor, fraction, and 1 for exact values: uint64[3].
        residual: result: the error feedback after sending: float32 [n].
        block: see `block_scratch`.
        listing: array for all entries: uint64; entries of each group so far: int64[GROUPS]; and minus the number of
            elements of each class since its last entry: int64[MAX_CLASSES].
        bits: array for the exact values without a rank: uint32; and position, pending bits and their number in it:
            uint64[3].
        squares: the sums of the squares of what is sent (`arithmetic.SquaredNorm`), which are updated: float64[8].
    """
    (changes, counts, gaps), (unranked, filled), base = listing, bits, inputs[0]
    floats, words, entries = block[0], block[2], block[3]
    # A chunk comes in one or two calls (its tail is padded): go on behind the entries of the first.
    number = U(0)
    for group in range(MAX_CLASSES):
        number += U(counts[group])
    for start in range(0, base.size, BLOCK_ELEMENTS):
        end = min(start + BLOCK_ELEMENTS, base.size)
        # 1. Which entries are sent, their values, and what remains. An update that is not finite ends the pass.
        infinite = gate_block(inputs, start, end, decay, grid, residual[start:end], block)
        if infinite != W(0):
            return I(NOT_FINITE)
        # 2. The norm, of all elements in their order: those that are not sent are zeros.
        for vector in range((end - start) // VECTOR_SIZE):
            add_squares(floats, U(vector * VECTOR_SIZE), squares)
        # 3. The entries, side by side, so that the next step has no gaps to skip.
        count = list_entries(base[start:end].view(np.uint32), form, block, gaps, counts)
        # 4. Ranks, and the bits of values without one, in the order of the elements.
        rank_entries(words, count, grid)
        if grid[2] != U(0):
            put_unranked(words, count, unranked, filled)
        # 5. Size and flag join the gap and the class.
        for i in range(count):
            rank = U(words[3, i])
            changes[number + U(i)] = entries[i] | ((rank >> U(1)) + U(1)) | (rank & U(1)) << U(32)
        number += count
    return I(number)


assert int(np.float32(ROUNDER).view(np.uint32)) == 0x4B400000
