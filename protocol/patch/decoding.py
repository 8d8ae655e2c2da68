"""The decoder's hot loops: waits and steps back to changes (docs/spec/patch.md, section 3). The mirror of encoding.py.

The bytes may be hostile and numba does not check: every index is compared with its array's size before it is used, and every
loop consumes elements, changes or words of a section, of each of which there are finitely many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from protocol.patch.jit import kernel
from protocol.patch.rangecoder import (
    CONTEXTS,
    FULL,
    MAX_LENGTH,
    NARROW,
    TAIL_WORDS,
    WIDE,
    WINDOW,
    I,
    U,
    bits_at,
    key_of,
    surviving,
)

PAST_THE_END: Final = -2
CUT_OFF: Final = -3
NOT_A_CODE: Final = -4
LEAVES_CLASS: Final = -5
LEAVES_DTYPE: Final = -6
LEFT_OVER: Final = -7
NO_SIGNS: Final = -8

reasons: Final = {
    PAST_THE_END: "a gap past the end",
    CUT_OFF: "a section that is cut off",
    NOT_A_CODE: "bytes that no encoder writes",
    LEAVES_CLASS: "a step out of its class",
    LEAVES_DTYPE: "a step out of the dtype",
    LEFT_OVER: "bytes left over in a section",
    NO_SIGNS: "signs that are cut off",
}
"""What is wrong, by the status that a kernel returns."""


@kernel()
def refill(value: Any, width: Any, words: Any, position: Any, least: Any) -> Any:
    """Read words until the interval is at least `least` wide, the first without a branch; beyond the end they are zero."""
    narrow = U(width < least)
    next_word = U(words[position]) if position < words.size else U(0)
    value = (value << (narrow << U(4))) | (next_word & (U(0) - narrow))
    width = width << (narrow << U(4))
    position += I(narrow)
    while width < least:
        word = U(0)
        if position < words.size:
            word = U(words[position])
        position += 1
        value = (value << U(16)) | word
        width = width << U(16)
    return value, width, position


@kernel()
def get_bit(value: Any, width: Any, words: Any, position: Any, odds: Any, seen: Any, rates: Any, context: Any) -> Any:
    """The mirror of put_bit."""
    value, width, position = refill(value, width, words, position, U(NARROW))
    odd = U(odds[context])
    split = (width >> U(16)) * odd
    count = seen[context]
    bit = value < split
    if bit:
        width = split
        odd = min(odd + (((U(65536) - odd) * rates[count]) >> U(16)), U(65504))
    else:
        value -= split
        width -= split
        odd = max(odd - ((odd * rates[count]) >> U(16)), U(32))
    odds[context] = odd
    if count < 255:
        seen[context] = count + 1
    return value, width, position, bit


@kernel()
def first_value(words: Any) -> Any:
    """The first four words, as the decoder's first value."""
    value = U(0)
    for position in range(4):
        value = (value << U(16)) | (U(words[position]) if position < words.size else U(0))
    return value


@kernel()
def logarithm(number: Any, logarithms: Any) -> Any:
    """log2 of a positive integer in ticks, good to a few ticks."""
    bits = U(np.float64(number).view(np.int64))
    index = (bits >> U(42)) & U(1023)
    below = logarithms[index]
    rest = I((bits >> U(32)) & U(1023))
    return (I(bits >> U(52)) << I(20)) + below + (((logarithms[index + U(1)] - below) * rest) >> I(10))


@kernel()
def sure_ticks(value: Any, unit: Any, logarithms: Any) -> Any:
    """Ticks that surely pass before the coded one: the inverse of `surviving`, a few ticks short."""
    ticks = logarithm(unit, logarithms) + I(32 << 20) - logarithm(value + U(1), logarithms) - I(16)
    return max(ticks, I(0))


@kernel()
def pass_windows(value: Any, width: Any, words: Any, position: Any, wait: Any) -> Any:
    """Read the windows that pass without a change; `wait` falls by one window for each."""
    value, width, position = refill(value, width, words, position, U(WIDE))
    while value < (width >> U(32)) << U(16) and position <= words.size + TAIL_WORDS:
        wait -= I(WINDOW)
        value, width, position = refill(value, (width >> U(32)) << U(16), words, position, U(WIDE))
    return value, width, position, wait


@kernel()
def get_step(
    value: Any, width: Any, words: Any, position: Any, raw: Any, count: Any, odds: Any, seen: Any, rates: Any, base: Any
) -> Any:
    """The mirror of put_step; `count` turns negative when the raw bits run out."""
    length, size, left = I(0), U(1), I(1)
    unary = True
    context = base
    while left > 0:
        value, width, position, bit = get_bit(value, width, words, position, odds, seen, rates, context)
        if unary:
            length += I(bit)
            unary = bit and length < MAX_LENGTH
            left = I(1) if unary else min(length, I(2))
            context = base + length if unary else base + I(32) + length
        else:
            size = size * U(2) + U(bit)
            left -= I(1)
            context = base + I(64) + I(2) * length + I(bit)
    rest = max(length - I(2), I(0))
    if count + I(1) + rest > I(8) * raw.size:
        return value, width, position, I(-1), size, U(0)
    negative = (U(raw[U(count) >> U(3)]) >> U(count & I(7))) & U(1)
    count += I(1)
    below = U(0)
    for bit_number in range(rest):
        below |= ((U(raw[U(count) >> U(3)]) >> U(count & I(7))) & U(1)) << U(bit_number)
        count += I(1)
    return value, width, position, count, (size << U(rest)) | below, negative


@kernel()
def stepped(bits: Any, size: Any, down: Any, order: Any) -> Any:
    """The pattern `size` steps away, and 0 or what is wrong with it."""
    key = key_of(bits, order) + ((size ^ (U(0) - down)) + down)
    return bits_at(key & order[3], order), I(0) if key <= order[3] else I(LEAVES_DTYPE)


@kernel()
def after_last(waits: Any, at_word: Any, steps: Any, at_step: Any, raw: Any, bits: Any) -> Any:
    """Whether the sections end where the decoder does: 0 or what is wrong."""
    if at_word > waits.size + TAIL_WORDS or at_step > steps.size + TAIL_WORDS:
        return I(CUT_OFF)
    if at_word < waits.size or at_step < steps.size or (bits + I(7)) // I(8) != raw.size:
        return I(LEFT_OVER)
    return I(0)


def get_listed(
    old: Any, new: Any, count: Any, back: Any, order: Any, listed: Any, weight: Any, survival: Any, logarithms: Any,
    waits: Any, rates: Any, odds: Any, seen: Any, steps: Any, raw: Any
) -> Any:  # fmt: skip
    """Decode `count` listed changes of `old` into `new`, steps turned round when `back` is 1; returns 0 or what is wrong.

    Their indices go to `listed`, which has room for `count` and one more: the number of elements stands behind the last.
    """
    value, at_word = first_value(waits), I(4)
    step_value, at_step = first_value(steps), I(4)
    width = step_width = U(FULL)
    bits, index = I(0), I(0)
    for number in range(count):
        value, width, at_word, behind = pass_windows(value, width, waits, at_word, I(0))
        if at_word > waits.size + TAIL_WORDS or value >= width:
            return I(CUT_OFF)
        unit = width >> U(32)
        gap = max(I(float(sure_ticks(value, unit, logarithms) - behind) / float(weight)), I(0))
        left = value + U(1)
        while left > value and gap <= old.size:
            end = min((gap + I(1)) * weight + behind, I(WINDOW))
            left = surviving(survival, unit, U(max(end, I(0))))
            gap += I(1)
        index += gap - I(1)
        if index >= old.size or left > value:
            return I(PAST_THE_END)
        above = surviving(survival, unit, U(min(max((gap - I(1)) * weight + behind, I(0)), I(WINDOW))))
        if value >= above:
            return I(NOT_A_CODE)
        value, width = value - left, above - left
        step_value, step_width, at_step, bits, size, down = get_step(
            step_value, step_width, steps, at_step, raw, bits, odds, seen, rates, I(0)
        )
        if bits < 0:
            return I(NO_SIGNS)
        after, status = stepped(U(old[U(index)]), size, down ^ back, order)
        if status != 0:
            return status
        new[U(index)] = after
        listed[number] = index
        index += I(1)
    listed[count] = old.size
    return after_last(waits, at_word, steps, at_step, raw, bits)


@kernel()
def seek(
    shift: Any, old: Any, weights: Any, listed: Any, survival: Any, value: Any, unit: Any, sure: Any, index: Any,
    stop: Any, passed: Any, wait: Any
) -> Any:  # fmt: skip
    """From `index` on, the element that `value` waits for, over the listed ones; ends at `stop` where there is none."""
    left = value + U(1)
    while True:
        while index + U(8) <= stop:
            block = U(0)
            for offset in range(8):
                block += weights[U(old[index + U(offset)]) >> U(shift)]
            if wait + I(block) > sure:
                break
            wait += I(block)
            index += U(8)
        if index + U(8) <= stop:
            total, within, passing = wait, I(0), U(0)
            for offset in range(8):  # no branch: which of the eight it is cannot be guessed
                weight = I(weights[U(old[index + U(offset)]) >> U(shift)])
                total += weight
                before = I(total <= sure)
                within += weight & (I(0) - before)
                passing += U(before)
            wait += within
            index += passing
        while index < stop:
            end = wait + I(weights[U(old[index]) >> U(shift)])
            if end > sure:
                left = surviving(survival, unit, U(min(end, I(WINDOW))))
                if left <= value:
                    break
            wait = end
            index += U(1)
        if index < stop or stop == U(old.size):
            break
        index = stop + U(1)
        passed += U(1)
        stop = U(listed[passed])
    return index, stop, passed, wait, left


def classed_getter(shift: int) -> Callable[..., int]:
    """`get_classed` for elements whose groups begin at bit `shift`."""

    def get_classed(
        old: Any, new: Any, count: Any, back: Any, order: Any, listed: Any, classes: Any, weights: Any,
        survival: Any, logarithms: Any, waits: Any, rates: Any, odds: Any, seen: Any, steps: Any, raw: Any
    ) -> Any:  # fmt: skip
        """Decode `count` classed changes of `old` into `new`, steps turned round when `back` is 1; returns 0 or what is wrong.

        The elements in `listed` are passed over: nothing waits for them. The number of elements stands behind the last of them.
        """
        value, at_word = first_value(waits), I(4)
        step_value, at_step = first_value(steps), I(4)
        width = step_width = U(FULL)
        bits = I(0)
        index, passed, stop = U(0), U(0), U(listed[0])
        for _ in range(count):
            value, width, at_word, wait = pass_windows(value, width, waits, at_word, I(0))
            if at_word > waits.size + TAIL_WORDS or value >= width:
                return I(CUT_OFF)
            unit = width >> U(32)
            sure = sure_ticks(value, unit, logarithms)
            index, stop, passed, wait, left = seek(
                shift, old, weights, listed, survival, value, unit, sure, index, stop, passed, wait
            )
            if index >= stop:
                return I(PAST_THE_END)
            above = surviving(survival, unit, U(min(max(wait, I(0)), I(WINDOW))))
            if value >= above:
                return I(NOT_A_CODE)
            value, width = value - left, above - left
            group = U(old[index]) >> U(shift)
            base = I(classes[group]) * I(CONTEXTS)
            step_value, step_width, at_step, bits, size, down = get_step(
                step_value, step_width, steps, at_step, raw, bits, odds, seen, rates, base
            )
            if bits < 0:
                return I(NO_SIGNS)
            after, status = stepped(U(old[index]), size, down ^ back, order)
            if status == 0 and classes[after >> U(shift)] != classes[group]:
                status = I(LEAVES_CLASS)
            if status != 0:
                return status
            new[index] = after
            index += U(1)
        return after_last(waits, at_word, steps, at_step, raw, bits)

    return get_classed


@dataclass(frozen=True, slots=True)
class Decoders:
    """The decoder's kernels of one element width."""

    get_listed: Callable[..., int]
    get_classed: Callable[..., int]


@cache
def decoders_for(itemsize: int, shift: int) -> Decoders:
    """Compile the kernels for elements of `itemsize` bytes and groups at bit `shift`, or load them from numba's cache."""
    element, byte, half, table = f"uint{8 * itemsize}[::1]", "uint8[::1]", "uint16[::1]", "uint64[::1]"
    decoded = (element, element, "int64", "uint64", table, "uint32[::1]")
    sections = ("int64[::1]", half, table, half, byte, half, byte)
    return Decoders(
        get_listed=kernel(*decoded, "int64", table, *sections)(get_listed),
        get_classed=kernel(*decoded, byte, table, table, *sections)(classed_getter(shift)),
    )
