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
from protocol.kernels.simd import bits_of_float
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

MARGIN: Final = 32
"""Integers behind a section that the decoder may read before it checks that it has not ended."""


@kernel
def describe(
    old: Bits, new: Bits, form: UInt64Array, order: UInt64Array, sizes: UInt32Array, symbols: UInt16Array
) -> Any:
    """Write the size of each element's step, uint32 [n], and its symbol plus SYMBOLS times its class, uint16 [n].
    `form` and `order` are as for `entropy_encoding.scan`.
    """
    shift, mask, first, last = W(form[0]) & W(31), W(form[1]), W(form[2]), W(form[3])
    sign, positive, negative = W(U(63) - order[0]), W(order[1]), W(order[2])
    is_float = W(order[2] != U(0))
    for i in range(old.size):
        before, after = W(old[i]), W(new[i])
        # Keys as `rans.key_of`. Shifts are masked where they are used, or the compiler would take 64-bit integers.
        minus = W(before >> (sign & W(31)))
        key = W(before ^ positive ^ W(W(W(0) - minus) & negative))
        key_after = W(after ^ positive ^ W(W(W(0) - W(after >> (sign & W(31)))) & negative))
        size = W(max(key, key_after) - min(key, key_after))
        shrinks = W(W(key_after < key) ^ W(minus & is_float))
        own = min(W(max(W(W(before >> (shift & W(31))) & mask), first) - first), last)
        # s + 1, from the exponent and the first two bits of the mantissa of a float. It is rounded down, because the
        # upper one of the bits that a float has no room for is cleared.
        single = bits_of_float(F(W(size & ~W(size >> W(24)))))
        symbol = W(max(W(min(size, W(3)) + W(512)), W(single >> W(21))) - W(512))
        sizes[i] = size
        symbols[i] = W(own << W(8)) | (W(W(symbol << W(1)) | shrinks) if size != W(0) else W(0))
    return I(0)


@kernel
def count_symbols(symbols: UInt16Array, counts: UInt32Array) -> Any:
    """Count symbols by class: uint32 [4, classes * SYMBOLS], to be added up."""
    # Four tables, because an addition to the same number waits for the last one.
    for i in range(symbols.size):
        counts[U(i) & U(3), U(symbols[U(i)])] += W(1)
    return I(0)


@inlined
def raw_width(symbol: int) -> Any:
    """Return the number of a symbol's raw bits."""
    return (max(symbol, U(8)) >> U(3)) - U(1)


@kernel
def put_sizes(symbols: UInt16Array, sizes: UInt32Array, raw: UInt32Array) -> Any:
    """Write the raw bits of the steps to uint32 `raw`; return their number."""
    position, pending, fill = U(0), U(0), U(0)
    for i in range(symbols.size):
        width = raw_width(U(symbols[U(i)]) & U(SYMBOLS - 1))
        fine = U(sizes[U(i)]) & ((U(1) << width) - U(1))
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
    shift, mask, first, last = W(form[0]), W(form[1]), W(form[2]), W(form[3])
    for i in range(old.size):
        exponent = max(W(W(W(old[i]) >> (shift & W(31))) & mask), first)
        classes[i] = W(min(W(exponent - first), last) << W(SLOT_BITS))
    return I(0)


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
        # All entries first: each lookup needs a state of the last round alone.
        one = U(table[U(classes[i]) | (a & U(SLOTS - 1))])
        two = U(table[U(classes[i + U(1)]) | (b & U(SLOTS - 1))])
        three = U(table[U(classes[i + U(2)]) | (c & U(SLOTS - 1))])
        four = U(table[U(classes[i + U(3)]) | (d & U(SLOTS - 1))])
        five = U(table[U(classes[i + U(4)]) | (e & U(SLOTS - 1))])
        six = U(table[U(classes[i + U(5)]) | (f & U(SLOTS - 1))])
        seven = U(table[U(classes[i + U(6)]) | (g & U(SLOTS - 1))])
        eight = U(table[U(classes[i + U(7)]) | (h & U(SLOTS - 1))])
        a, at = get_symbol(a, words, at, one)
        b, at = get_symbol(b, words, at, two)
        c, at = get_symbol(c, words, at, three)
        d, at = get_symbol(d, words, at, four)
        e, at = get_symbol(e, words, at, five)
        f, at = get_symbol(f, words, at, six)
        g, at = get_symbol(g, words, at, seven)
        h, at = get_symbol(h, words, at, eight)
        symbols[i], symbols[i + U(1)], symbols[i + U(2)] = one >> U(24), two >> U(24), three >> U(24)
        symbols[i + U(3)], symbols[i + U(4)], symbols[i + U(5)] = four >> U(24), five >> U(24), six >> U(24)
        symbols[i + U(6)], symbols[i + U(7)] = seven >> U(24), eight >> U(24)
        if at > end:
            return I(CUT_OFF)
    states[0], states[1], states[2], states[3], states[4], states[5], states[6], states[7] = a, b, c, d, e, f, g, h
    for i in range(whole, symbols.size):
        lane = U(i) & U(LANES - 1)
        entry = U(table[U(classes[U(i)]) | (states[lane] & U(SLOTS - 1))])
        states[lane], at = get_symbol(states[lane], words, at, entry)
        symbols[U(i)] = entry >> U(24)
    states[LANES] = at
    return I(0) if at <= end else I(CUT_OFF)


@kernel
def get_sizes(symbols: UInt8Array, raw: UInt32Array, bits: UInt64Array, sizes: UInt32Array) -> Any:
    """Read the raw bits of the symbols that have some, uint32 [n]; return a status. `bits` has the number of the next
    bit and that of all bits: uint64 [2].
    """
    at = bits[0]
    for i in range(symbols.size):
        sizes[U(i)], at = get_bits(raw, at, raw_width(U(symbols[U(i)])))
        if at > bits[1]:
            return I(CUT_OFF)
    bits[0] = at
    return I(0)


@kernel
def apply_steps(old: Bits, sizes: UInt32Array, symbols: UInt8Array, order: UInt64Array, new: Bits) -> Any:
    """Write the new elements, which may take the place of the old ones; return a status. `sizes` has the raw bits."""
    sign, positive, negative, largest = W(U(63) - order[0]), W(order[1]), W(order[2]), W(order[3])
    is_float, wrong = W(order[2] != U(0)), W(0)
    for i in range(old.size):
        before, symbol = W(old[i]), W(symbols[i])
        # The size: s + 1 if it is below 4, else a one and two more bits at the place that s gives, and the raw bits.
        following = W(symbol >> W(1))
        octave = W(max(following, W(4)) - W(4))
        lead = W(W(4) | W(octave & W(3))) if following >= W(4) else following
        size = W(W(lead << W(octave >> W(2) & W(31))) | (W(sizes[i]) if following >= W(8) else W(0)))
        minus = W(before >> (sign & W(31)))
        key = W(before ^ positive ^ W(W(W(0) - minus) & negative))
        down = W(W(symbol & W(1)) ^ W(minus & is_float))
        after = W(key - size) if down != W(0) else W(key + size)
        # A key of 32 bits that leaves the dtype appears on the other side of the old one.
        wrong |= W(after > largest) | (W(W(after > key) == down) & W(size != W(0)))
        plus = W(W(after >> (sign & W(31))) & W(1))
        new[i] = W(after ^ positive ^ negative ^ W(W(W(0) - plus) & negative))
    return I(0) if wrong == W(0) else I(LEAVES_DTYPE)
