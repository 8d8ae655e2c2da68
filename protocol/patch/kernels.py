"""The hot loops: scan, code, decode (docs/spec/patch.md, section 3). One machine-code version for each element width.

A change is *listed* (its wait counted in elements, all alike) when its class differs before and after, *classed* otherwise (its
wait counted in ticks, each element as many as its class is likely to change). Every index is checked before it is used:
numba does not check. Elements are compared a 64-bit word at a time; table look-ups stay scalar, because gather instructions
are many times slower on processors with the fix for gather data sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numba
import numpy as np

from protocol.patch.jit import kernel
from protocol.patch.rangecoder import (
    NARROW,
    TAIL_WORDS,
    WIDE,
    WINDOW,
    finish,
    get_bit,
    put_bit,
    put_wait,
    refill,
    surviving,
)

U = numba.uint64
I = numba.int64  # noqa: E741

CONTEXTS: Final = 128
"""Adaptive bits of one class: 0..31 for the length of a step, 32..63 and 64..127 for the two bits below its leading one."""

MAX_LENGTH: Final = 31
"""Bits below the leading one of the largest step, 2^32 - 1."""

FULL: Final = 0xFFFFFFFFFFFFFFFF

OUT_OF_ROOM: Final = -1
PAST_THE_END: Final = -2
CUT_OFF: Final = -3
NOT_A_CODE: Final = -4
LEAVES_CLASS: Final = -5
LEAVES_DTYPE: Final = -6
LEFT_OVER: Final = -7
NO_SIGNS: Final = -8


@kernel()
def put_raw(raw: Any, count: Any, bit: Any) -> Any:
    """Append one bit, least significant first, to zeroed bytes."""
    raw[U(count) >> U(3)] |= np.uint8(bit << U(count & I(7)))
    return count + I(1)


@kernel()
def put_step(
    low: Any, width: Any, out: Any, position: Any, raw: Any, count: Any, odds: Any, seen: Any, rates: Any,
    base: Any, size: Any, negative: Any
) -> Any:  # fmt: skip
    """A step: sign raw, length in unary and the two bits below the leading one by odds, the rest raw."""
    count = put_raw(raw, count, negative)
    length = I(0)
    while (size >> U(length + I(1))) != U(0):
        length += I(1)
    unary = min(length + I(1), I(MAX_LENGTH))
    context = base
    for number in range(unary + min(length, I(2))):
        if number < unary:
            bit = number < length
            context = base + number
        elif number == unary:
            bit = (size >> U(length - I(1))) & U(1) != U(0)
            context = base + I(32) + length
        else:
            context = base + I(64) + I(2) * length + I(bit)
            bit = (size >> U(length - I(2))) & U(1) != U(0)
        low, width, position = put_bit(low, width, out, position, odds, seen, rates, context, bit)
    for below in range(length - I(2)):
        count = put_raw(raw, count, (size >> U(below)) & U(1))
    return low, width, position, count


@kernel()
def key_of(bits: Any, order: Any) -> Any:
    """A bit pattern's place in the order of its dtype (values.Layout.order), without a branch to guess."""
    sign = (bits >> order[0]) & U(1)
    return bits ^ order[1] ^ ((U(0) - sign) & order[2])


@kernel()
def bits_at(key: Any, order: Any) -> Any:
    """The bit pattern at a place in the order of its dtype."""
    sign = U(1) - ((key >> order[0]) & U(1))
    return key ^ order[1] ^ ((U(0) - sign) & order[2])


@kernel()
def distance(before: Any, after: Any) -> Any:
    """How far apart two places are, and whether the way goes down."""
    down = U(after < before)
    return ((after - before) ^ (U(0) - down)) + down, down


def scanner(lanes: int) -> Callable[..., tuple[int, int, int]]:
    """`scan` for words of `lanes` elements."""
    bits = 64 // lanes
    element = (1 << bits) - 1

    def scan(
        old: Any, new: Any, old_words: Any, new_words: Any, shift: Any, classes: Any, weights: Any, survival: Any,
        listed: Any, out: Any, at: Any
    ) -> Any:  # fmt: skip
        """Find the changes; code the waits of those that keep their class, note the others.

        Returns:
            changes listed (indices in `listed`), changes classed (indices in `at`), words of `out` (or OUT_OF_ROOM).
        """
        low, width, position = U(0), U(FULL), I(0)
        wait = U(0)
        n_listed, n_classed = I(0), I(0)
        room = out.size - 16
        mask = U(weights.size - 1)
        for number in range(old_words.size + 1):
            if number < old_words.size:
                before, after = old_words[number], new_words[number]
            else:
                before, after = U(0), U(0)
                for lane in range(old.size - number * lanes):
                    before |= U(old[number * lanes + lane]) << U(lane * bits)
                    after |= U(new[number * lanes + lane]) << U(lane * bits)
            if before == after:
                for _ in range(lanes):
                    wait += weights[before >> shift & mask]
                    before >>= U(bits)
                continue
            for lane in range(lanes):
                was, becomes = before & U(element), after & U(element)
                before >>= U(bits)
                after >>= U(bits)
                group = was >> shift
                if was == becomes:
                    wait += weights[group]
                elif classes[group] != classes[becomes >> shift]:
                    listed[n_listed] = number * lanes + lane
                    n_listed += I(1)
                else:
                    low, width, position = put_wait(low, width, out, position, survival, wait, weights[group])
                    if position > room:
                        return n_listed, n_classed, I(OUT_OF_ROOM)
                    at[n_classed] = number * lanes + lane
                    n_classed += I(1)
                    wait = U(0)
        return n_listed, n_classed, finish(low, width, out, position)

    return scan


def finder(lanes: int) -> Callable[..., int]:
    """`find` for words of `lanes` elements."""
    bits = 64 // lanes
    element = (1 << bits) - 1

    def find(old: Any, new: Any, old_words: Any, new_words: Any, listed: Any) -> Any:
        """The indices of all changes, into `listed`, which has room for every element; returns how many."""
        count = U(0)
        for number in range(old_words.size):
            differs = old_words[number] ^ new_words[number]
            if differs != U(0):
                for lane in range(lanes):
                    listed[count] = U(number) * U(lanes) + U(lane)
                    count += U((differs >> U(lane * bits)) & U(element) != U(0))
        for index in range(old_words.size * lanes, old.size):
            if old[index] != new[index]:
                listed[count] = index
                count += U(1)
        return I(count)

    return find


def put_waits(at: Any, count: Any, weight: Any, survival: Any, out: Any) -> Any:
    """Code the waits of listed changes; returns the words written, or OUT_OF_ROOM."""
    low, width, position = U(0), U(FULL), I(0)
    room = out.size - 16
    start = U(0)
    for number in range(count):
        index = U(at[number])
        low, width, position = put_wait(low, width, out, position, survival, (index - start) * weight, weight)
        if position > room:
            return I(OUT_OF_ROOM)
        start = index + U(1)
    return finish(low, width, out, position)


def put_steps(
    old: Any, new: Any, at: Any, count: Any, shift: Any, classes: Any, order: Any, rates: Any, odds: Any, seen: Any,
    out: Any, raw: Any
) -> Any:  # fmt: skip
    """Code the steps of the changes at `at`; returns the words and the raw bits written, or OUT_OF_ROOM."""
    low, width, position = U(0), U(FULL), I(0)
    bits = I(0)
    room = out.size - 64
    room_bits = I(8) * raw.size - I(64)
    for number in range(count):
        index = U(at[number])
        size, negative = distance(key_of(U(old[index]), order), key_of(U(new[index]), order))
        base = I(classes[U(old[index]) >> shift]) * I(CONTEXTS)
        low, width, position, bits = put_step(
            low, width, out, position, raw, bits, odds, seen, rates, base, size, negative
        )
        if position > room or bits > room_bits:
            return I(OUT_OF_ROOM), bits
    return finish(low, width, out, position), bits


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
    """The pattern `size` steps away, and whether the dtype has it."""
    key = key_of(bits, order) + ((size ^ (U(0) - down)) + down)
    return bits_at(key & order[3], order), key <= order[3]


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
        if at_word > waits.size + TAIL_WORDS:
            return I(CUT_OFF)
        unit = width >> U(32)
        gap = max(I(float(sure_ticks(value, unit, logarithms) - behind) / float(weight)) - I(1), I(0))
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
        after, inside = stepped(U(old[U(index)]), size, down ^ back, order)
        if not inside:
            return I(LEAVES_DTYPE)
        new[U(index)] = after
        listed[number] = index
        index += I(1)
    listed[count] = old.size
    return after_last(waits, at_word, steps, at_step, raw, bits)


def get_classed(
    old: Any, new: Any, count: Any, back: Any, order: Any, listed: Any, shift: Any, classes: Any, weights: Any,
    survival: Any, logarithms: Any, waits: Any, rates: Any, odds: Any, seen: Any, steps: Any, raw: Any
) -> Any:  # fmt: skip
    """Decode `count` classed changes of `old` into `new`, steps turned round when `back` is 1; returns 0 or what is wrong.

    The elements in `listed` are passed over: nothing waits for them. The number of elements stands behind the last of them.
    """
    value, at_word = first_value(waits), I(4)
    step_value, at_step = first_value(steps), I(4)
    width = step_width = U(FULL)
    bits = I(0)
    index, elements = U(0), U(old.size)
    passed, stop = U(0), U(listed[0])
    for _ in range(count):
        value, width, at_word, wait = pass_windows(value, width, waits, at_word, I(0))
        if at_word > waits.size + TAIL_WORDS:
            return I(CUT_OFF)
        unit = width >> U(32)
        sure = sure_ticks(value, unit, logarithms)
        left = value + U(1)
        while True:
            while index + U(8) <= stop:
                block = U(0)
                for offset in range(8):
                    block += weights[U(old[index + U(offset)]) >> shift]
                if wait + I(block) > sure:
                    break
                wait += I(block)
                index += U(8)
            while index < stop:
                end = wait + I(weights[U(old[index]) >> shift])
                if end > sure:
                    left = surviving(survival, unit, U(min(end, I(WINDOW))))
                    if left <= value:
                        break
                wait = end
                index += U(1)
            if index < stop or stop == elements:
                break
            index = stop + U(1)
            passed += U(1)
            stop = U(listed[passed])
        if index >= stop:
            return I(PAST_THE_END)
        above = surviving(survival, unit, U(min(max(wait, I(0)), I(WINDOW))))
        if value >= above:
            return I(NOT_A_CODE)
        value, width = value - left, above - left
        group = U(old[index]) >> shift
        base = I(classes[group]) * I(CONTEXTS)
        step_value, step_width, at_step, bits, size, down = get_step(
            step_value, step_width, steps, at_step, raw, bits, odds, seen, rates, base
        )
        if bits < 0:
            return I(NO_SIGNS)
        after, inside = stepped(U(old[index]), size, down ^ back, order)
        if not inside:
            return I(LEAVES_DTYPE)
        if classes[after >> shift] != classes[group]:
            return I(LEAVES_CLASS)
        new[index] = after
        index += U(1)
    return after_last(waits, at_word, steps, at_step, raw, bits)


def count_groups(
    old: Any, new: Any, shift: Any, stride: Any, order: Any, elements: Any, lengths: Any, crossings: Any
) -> Any:
    """Statistics of one block of 4096 elements in `stride`, added up by group.

    Args:
        elements: int64[groups], all elements.
        lengths: int64[groups * 32], changes that keep their group, by the length of their step.
        crossings: int64[groups], changes that leave it.
    """
    for start in range(I(0), old.size, I(4096) * stride):
        for index in range(U(start), U(min(start + I(4096), old.size))):
            group = U(old[index]) >> shift
            elements[group] += 1
            if old[index] == new[index]:
                continue
            if U(new[index]) >> shift != group:
                crossings[group] += 1
                continue
            size, _ = distance(key_of(U(old[index]), order), key_of(U(new[index]), order))
            length = U(0)
            while (size >> (length + U(1))) != U(0):
                length += U(1)
            lengths[group * U(32) + length] += 1
    return I(0)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one element width."""

    scan: Callable[..., tuple[int, int, int]]
    find: Callable[..., int]
    put_waits: Callable[..., int]
    put_steps: Callable[..., tuple[int, int]]
    get_listed: Callable[..., int]
    get_classed: Callable[..., int]
    count_groups: Callable[..., int]


@cache
def kernels_for(itemsize: int) -> Kernels:
    """Compile the kernels for elements of `itemsize` bytes, or load them from numba's cache."""
    element, byte, half, index, table, count = (
        f"uint{8 * itemsize}[::1]", "uint8[::1]", "uint16[::1]", "uint32[::1]", "uint64[::1]", "int64[::1]",
    )  # fmt: skip
    sections = (half, table, half, byte, half, byte)
    lanes = 8 // itemsize

    def compiled(function: Callable[..., Any], *arguments: str) -> Callable[..., Any]:
        return kernel(f"({', '.join(arguments)})")(function)

    decoded = (element, element, "int64", "uint64", table, index)
    return Kernels(
        scan=compiled(
            scanner(lanes), element, element, table, table, "uint64", byte, table, table, index, half, index
        ),
        find=compiled(finder(lanes), element, element, table, table, index),
        put_waits=compiled(put_waits, index, "int64", "uint64", table, half),
        put_steps=compiled(
            put_steps, element, element, index, "int64", "uint64", byte, table, table, half, byte, half, byte
        ),
        get_listed=compiled(get_listed, *decoded, "int64", table, count, *sections),
        get_classed=compiled(get_classed, *decoded, "uint64", byte, table, table, count, *sections),
        count_groups=compiled(count_groups, element, element, "uint64", "int64", table, count, count, count),
    )


def warm_up() -> None:
    """Compile the kernels for 16-bit elements, or load them: seconds the first time on a machine, a moment after that."""
    kernels_for(2)
