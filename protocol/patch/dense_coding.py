"""The kernels of dense frames: the step of every element is a symbol (docs/spec/patch.md, section 4).

Where many elements change, gaps say little, and to collect changes and sort them by class costs more than to code all
elements. The symbol of an element is 0 if it is unchanged, else 2 s + 2, and 1 more if its magnitude shrinks, where s
is the symbol of the step's size (`rans.symbol_of`). So symbols from 16 on have raw bits, and others have none.

Loops without branches, of 32-bit integers, compute what needs no table: they are compiled to SIMD. Elements take turns
at eight states of the coder, so that none waits for the result of another.
"""

from typing import Any, Final

import numba

from protocol.kernels.jit import UInt8Array, UInt16Array, UInt32Array, UInt64Array, inlined, kernel
from protocol.kernels.simd import VECTOR_SIZE, at_least_mask, bits_of_float, lowest_bit, shift_right
from protocol.patch.entropy_decoding import CUT_OFF, LEAVES_DTYPE, get_bits
from protocol.patch.entropy_encoding import ENTRY, put_bits
from protocol.patch.rans import MIN_STATE, SLOT_BITS, SLOTS, I, U, get_symbol, put_state, put_symbol
from protocol.patch.values import Bits

W: Any = numba.uint32
F: Any = numba.float32

LANES: Final = 8
"""States of the coder; an element has the state of its index modulo LANES."""

SYMBOLS: Final = 256
"""Symbols of a class's table, of which at most 247 are in use."""

FIRST_RAW: Final = 16
FIRST_RAW_SIZE: Final = 8
"""The first symbol that has raw bits, and the smallest size that such a symbol stands for."""

BLOCK: Final = 1 << 12
"""Elements that go through all steps before the next ones: they stay in the processor's nearest cache."""

MARGIN: Final = 64
"""Integers behind a section that the decoder may read before it checks that it has not ended."""


@inlined
def raw_width(symbol: int) -> Any:
    """Return the number of a symbol's raw bits."""
    return (max(symbol, U(8)) >> U(3)) - U(1)


@kernel
def describe(elements: Any, form: UInt64Array, order: UInt64Array, scratch: Any, counts: UInt32Array) -> Any:
    """Write the symbol of each element's step plus SYMBOLS times its class, uint16 [n], and the raw bits of the steps,
    uint32; return the number of these bits. `counts` gets the number of each symbol by class: uint32
    [4, classes * SYMBOLS], to be added up. `elements` are the old and the new ones; `scratch` the sizes of a block,
    uint32 [BLOCK], the symbols, and the raw bits. `form` and `order` are as for `entropy_encoding.scan`.
    """
    (old, new), (sizes, symbols, raw) = elements, scratch
    shift, mask, first, last = W(form[0]) & W(31), W(form[1]), W(form[2]), W(form[3])
    top, positive, negative = W(U(1) << (U(63) - order[0])), W(order[1]), W(order[1] ^ order[2])
    is_float = W(order[2] != U(0))
    position, pending, fill = U(0), U(0), U(0)
    # Each block goes through all steps while it is in the processor's cache.
    for begin in range(0, old.size, BLOCK):
        block, block_after, own = old[begin : begin + BLOCK], new[begin : begin + BLOCK], symbols[begin : begin + BLOCK]
        for i in range(block.size):
            before, after = W(block[i]), W(block_after[i])
            # Keys as `rans.key_of`.
            key = W(before ^ (negative if before >= top else positive))
            key_after = W(after ^ (negative if after >= top else positive))
            size = W(max(key, key_after) - min(key, key_after))
            shrinks = W(W(key_after < key) ^ (is_float if before >= top else W(0)))
            number = min(W(max(W(shift_right(before, shift) & mask), first) - first), last)
            # s + 1, from the exponent and the first two bits of the mantissa of a float. It is rounded down, because
            # the upper one of the bits that a float has no room for is cleared.
            single = bits_of_float(F(W(size & ~W(size >> W(24)))))
            symbol = W(max(W(min(size, W(3)) + W(512)), W(single >> W(21))) - W(512))
            sizes[i] = size
            own[i] = W(number << W(8)) | (W(W(symbol << W(1)) | shrinks) if size != W(0) else W(0))
        sizes[block.size :] = W(0)
        # Four tables of counts, because an addition to the same number waits for the last one.
        for i in range(own.size):
            counts[U(i) & U(3), U(own[U(i)])] += W(1)
        for vector in range(0, BLOCK, VECTOR_SIZE):
            # A one for each size that its symbol leaves undetermined: for small steps there are few.
            rest = at_least_mask(sizes, U(vector), W(FIRST_RAW_SIZE))
            while rest != U(0):
                place = U(vector) + lowest_bit(rest)
                rest &= rest - U(1)
                width = raw_width(U(own[place]) & U(SYMBOLS - 1))
                fine = U(sizes[place]) & ((U(1) << width) - U(1))
                position, pending, fill = put_bits(raw, position, pending, fill, fine, width)
    raw[position] = pending
    return I(position << U(5)) + I(fill)


@kernel
def put_symbols(symbols: UInt16Array, table: UInt64Array, states: UInt64Array, out: UInt16Array) -> Any:
    """Code symbols by an encoder table of all classes, flat; return the index in `out` of the first word. Words are
    written from the end. `states` is scratch memory: uint64 [LANES].
    """
    for lane in range(LANES):
        states[U(lane)] = U(MIN_STATE)
    position, number = U(out.size), U(symbols.size)
    # The encoder goes backwards, so it begins with the elements behind the last whole round of lanes.
    while number & U(LANES - 1):
        number -= U(1)
        entry, lane = U(symbols[number]) * U(ENTRY), number & U(LANES - 1)
        states[lane], position = put_symbol(states[lane], out, position, table, entry)
    a, b, c, d, e, f, g, h = states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7]
    while number:
        number -= U(LANES)
        h, position = put_symbol(h, out, position, table, U(symbols[number + U(7)]) * U(ENTRY))
        g, position = put_symbol(g, out, position, table, U(symbols[number + U(6)]) * U(ENTRY))
        f, position = put_symbol(f, out, position, table, U(symbols[number + U(5)]) * U(ENTRY))
        e, position = put_symbol(e, out, position, table, U(symbols[number + U(4)]) * U(ENTRY))
        d, position = put_symbol(d, out, position, table, U(symbols[number + U(3)]) * U(ENTRY))
        c, position = put_symbol(c, out, position, table, U(symbols[number + U(2)]) * U(ENTRY))
        b, position = put_symbol(b, out, position, table, U(symbols[number + U(1)]) * U(ENTRY))
        a, position = put_symbol(a, out, position, table, U(symbols[number]) * U(ENTRY))
    for state in (h, g, f, e, d, c, b, a):
        position = put_state(state, out, position)
    return I(position)


@kernel
def classify(old: Bits, form: UInt64Array, classes: UInt16Array) -> Any:
    """Write SLOTS times the class of each element: uint16 [n]."""
    shift, mask, first, last = W(form[0]) & W(31), W(form[1]), W(form[2]), W(form[3])
    for i in range(old.size):
        exponent = max(W(shift_right(W(old[i]), shift) & mask), first)
        classes[i] = W(min(W(exponent - first), last) << W(SLOT_BITS))
    return I(0)


@inlined
def get_next(state: int, words: UInt16Array, at: int, table: UInt32Array, own: int) -> Any:
    """Decode the symbol of an element of the class `own`; return the new state, the next word's index, the symbol."""
    entry = U(table[U(own) | (state & U(SLOTS - 1))])
    state, at = get_symbol(state, words, at, entry)
    return state, at, entry >> U(24)


@kernel
def get_symbols(
    classes: UInt16Array, words: UInt16Array, table: UInt32Array, states: UInt64Array, symbols: UInt8Array
) -> Any:
    """Decode the symbols of elements, uint8 [n], by a decoder table of all classes, flat; return a status. `states` has
    the states, and the index of the next word: uint64 [LANES + 1].
    """
    end, whole = U(words.size - MARGIN), symbols.size // LANES * LANES
    a, b, c, d, e, f, g, h = states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7]
    at = states[LANES]
    for begin in range(0, whole, LANES):
        i = U(begin)
        a, at, symbols[i] = get_next(a, words, at, table, classes[i])
        b, at, symbols[i + U(1)] = get_next(b, words, at, table, classes[i + U(1)])
        c, at, symbols[i + U(2)] = get_next(c, words, at, table, classes[i + U(2)])
        d, at, symbols[i + U(3)] = get_next(d, words, at, table, classes[i + U(3)])
        e, at, symbols[i + U(4)] = get_next(e, words, at, table, classes[i + U(4)])
        f, at, symbols[i + U(5)] = get_next(f, words, at, table, classes[i + U(5)])
        g, at, symbols[i + U(6)] = get_next(g, words, at, table, classes[i + U(6)])
        h, at, symbols[i + U(7)] = get_next(h, words, at, table, classes[i + U(7)])
        if at > end:
            return I(CUT_OFF)
    states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7] = a, b, c, d, e, f, g, h
    for i in range(whole, symbols.size):
        lane = U(i) & U(LANES - 1)
        states[lane], at, symbols[U(i)] = get_next(states[lane], words, at, table, classes[U(i)])
    states[LANES] = at
    return I(0) if at <= end else I(CUT_OFF)


@kernel
def get_sizes(symbols: UInt8Array, raw: UInt32Array, bits: UInt64Array, sizes: UInt32Array) -> Any:
    """Read the raw bits of the symbols that have some, uint32 [n]; return a status. `bits` has the number of the next
    bit and that of all bits: uint64 [2].
    """
    at, whole = bits[0], symbols.size // VECTOR_SIZE * VECTOR_SIZE
    for begin in range(0, whole, VECTOR_SIZE):
        rest = at_least_mask(symbols, U(begin), W(FIRST_RAW))
        while rest != U(0):
            i = U(begin) + lowest_bit(rest)
            rest &= rest - U(1)
            sizes[i], at = get_bits(raw, at, raw_width(U(symbols[i])))
        if at > bits[1]:
            return I(CUT_OFF)
    for index in range(whole, symbols.size):
        sizes[U(index)], at = get_bits(raw, at, raw_width(U(symbols[U(index)])))
    bits[0] = at
    return I(0) if at <= bits[1] else I(CUT_OFF)


@kernel
def apply_steps(old: Bits, sizes: UInt32Array, symbols: UInt8Array, order: UInt64Array, new: Bits) -> Any:
    """Write the new elements, which may take the place of the old ones; return a status. `sizes` has the raw bits."""
    top, positive, negative, largest = W(U(1) << (U(63) - order[0])), W(order[1]), W(order[1] ^ order[2]), W(order[3])
    is_float, wrong = W(order[2] != U(0)), W(0)
    for i in range(old.size):
        before, symbol = W(old[i]), W(symbols[i])
        # The size: s + 1 if it is below 4, else a one and two more bits at the place that s gives, and the raw bits.
        following = W(symbol >> W(1))
        octave = W(max(following, W(4)) - W(4))
        lead = W(W(4) | W(octave & W(3))) if following >= W(4) else following
        size = W(W(lead << W(octave >> W(2) & W(31))) | (W(sizes[i]) if following >= W(8) else W(0)))
        key = W(before ^ (negative if before >= top else positive))
        down = W(W(symbol & W(1)) ^ (is_float if before >= top else W(0)))
        after = W(key - size) if down != W(0) else W(key + size)
        # A key of 32 bits that leaves the dtype appears on the other side of the old one.
        wrong = W(wrong | W(after > largest) | W(W(W(after > key) == down) & W(size != W(0))))
        new[i] = W(after ^ (positive if after >= top else negative))
    return I(0) if wrong == W(0) else I(LEAVES_DTYPE)


@kernel
def decode_elements(
    elements: Any, form: UInt64Array, order: UInt64Array, sections: Any, scratch: Any, symbols: UInt8Array
) -> Any:
    """Decode elements, and their symbols; return a status. `elements` are the old ones and the place of the new ones;
    `sections` the words, the table and the states of `get_symbols`, and the raw bits and their numbers of `get_sizes`;
    `scratch` the classes and the sizes of a block: uint16 and uint32 [BLOCK].
    """
    (old, new), (words, table, states, raw, bits), (classes, sizes) = elements, sections, scratch
    for begin in range(0, old.size, BLOCK):
        block, own = old[begin : begin + BLOCK], symbols[begin : begin + BLOCK]
        classify(block, form, classes)
        status = get_symbols(classes, words, table, states, own)
        if status == 0:
            status = get_sizes(own, raw, bits, sizes)
        if status == 0:
            status = apply_steps(block, sizes, own, order, new[begin : begin + BLOCK])
        if status != 0:
            return status
    return I(0)
