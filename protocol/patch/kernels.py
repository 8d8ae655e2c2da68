"""The hot loops: scan, code, decode (docs/spec/patch.md, section 3). One machine-code version for each element width.

A change is *listed* (its wait counted in elements, all alike) when its class differs before and after, *classed* otherwise (its
wait counted in ticks, each element as many as its class is likely to change). Every index is checked before it is used:
numba does not check.
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
    advance,
    finish,
    get_bit,
    put_bit,
    put_wait,
    refill,
    surviving,
    widen,
)

U = numba.uint64
I = numba.int64  # noqa: E741

CONTEXTS: Final = 128
"""Adaptive bits of one class: 0..31 for the length of a step, 32..63 and 64..127 for the two bits below its leading one."""

MAX_LENGTH: Final = 31
"""Bits below the leading one of the largest step, 2^32 - 1."""

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
    raw[count >> I(3)] |= np.uint8(bit << U(count & I(7)))
    return count + I(1)


@kernel()
def put_step(
    low: Any, width: Any, out: Any, position: Any, raw: Any, count: Any, odds: Any, seen: Any, rates: Any,
    base: Any, size: Any, negative: Any
) -> Any:  # fmt: skip
    """A step: sign raw, length in unary and the two bits below the leading one by odds, the rest raw."""
    count = put_raw(raw, count, U(negative))
    length = I(0)
    while (size >> U(length + 1)) != U(0):
        length += 1
        low, width, position = put_bit(low, width, out, position, odds, seen, rates, base + length - 1, True)
    if length < MAX_LENGTH:
        low, width, position = put_bit(low, width, out, position, odds, seen, rates, base + length, False)
    if length >= 1:
        first = (size >> U(length - 1)) & U(1)
        low, width, position = put_bit(
            low, width, out, position, odds, seen, rates, base + 32 + length, first == U(1)
        )
        if length >= 2:
            second = (size >> U(length - 2)) & U(1)
            context = base + 64 + 2 * length + I(first)
            low, width, position = put_bit(low, width, out, position, odds, seen, rates, context, second == U(1))
            for bit in range(length - 2):
                count = put_raw(raw, count, (size >> U(bit)) & U(1))
    return low, width, position, count


@kernel()
def key_of(bits: Any, top: Any, flip_positive: Any, flip_negative: Any) -> Any:
    """A bit pattern's place in the order of its dtype."""
    return bits ^ (flip_negative if bits & top else flip_positive)


@kernel()
def bits_at(key: Any, top: Any, flip_positive: Any, flip_negative: Any) -> Any:
    """The bit pattern at a place in the order of its dtype."""
    return key ^ (flip_positive if key & top else flip_negative)


def scan(old: Any, new: Any, shift: Any, classes: Any, weights: Any, survival: Any, listed: Any, out: Any, at: Any) -> Any:
    """Find the changes; code the waits of those that keep their class, note the others.

    Returns:
        changes listed, changes classed (their indices in `at`), words written to `out` (or OUT_OF_ROOM).
    """
    low, width, position = U(0), U(0xFFFFFFFFFFFFFFFF), I(0)
    wait = U(0)
    n_listed, n_classed = I(0), I(0)
    room = out.size - 16
    index = I(0)
    while index < old.size:
        before = old[index]
        after = new[index]
        group = U(before) >> shift
        if before == after:
            wait += weights[group]
        elif classes[group] != classes[U(after) >> shift]:
            listed[n_listed] = index
            n_listed += 1
            wait += weights[group]
        else:
            low, width, position = put_wait(low, width, out, position, survival, wait, weights[group])
            if position > room:
                return n_listed, n_classed, I(OUT_OF_ROOM)
            at[n_classed] = index
            n_classed += 1
            wait = U(0)
        index += 1
    if n_classed == 0:
        return n_listed, n_classed, I(0)
    return n_listed, n_classed, finish(low, width, out, position)


def find(old: Any, new: Any, listed: Any) -> Any:
    """The indices of all changes, into `listed` (room for one more than there are); returns how many."""
    count = U(0)
    start = U(0)
    block = U(32)
    size = U(old.size)
    while start + block <= size:
        differs = old[start] ^ new[start]
        for offset in range(32):
            differs |= old[start + U(offset)] ^ new[start + U(offset)]
        if differs:
            for offset in range(32):
                listed[count] = start + U(offset)
                count += U(old[start + U(offset)] != new[start + U(offset)])
        start += block
    while start < size:
        listed[count] = start
        count += U(old[start] != new[start])
        start += U(1)
    return I(count)


def put_waits(at: Any, count: Any, weight: Any, survival: Any, out: Any) -> Any:
    """Code the waits of listed changes; returns the words written, or OUT_OF_ROOM."""
    low, width, position = U(0), U(0xFFFFFFFFFFFFFFFF), I(0)
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
    low, width, position = U(0), U(0xFFFFFFFFFFFFFFFF), I(0)
    bits = I(0)
    room = out.size - 40
    room_bits = 8 * raw.size - 40
    for number in range(count):
        index = at[number]
        before = key_of(U(old[index]), order[0], order[1], order[2])
        after = key_of(U(new[index]), order[0], order[1], order[2])
        negative = after < before
        size = before - after if negative else after - before
        base = I(classes[U(old[index]) >> shift]) * I(CONTEXTS)
        low, width, position, bits = put_step(
            low, width, out, position, raw, bits, odds, seen, rates, base, size, negative
        )
        if position > room or bits > room_bits:
            return I(OUT_OF_ROOM), bits
    return finish(low, width, out, position), bits


@kernel()
def first_word(words: Any) -> Any:
    """The decoder's first value."""
    value, _, position = refill(U(0), U(1), words, I(0), U(NARROW))
    low_half, _, position = refill(U(0), U(1), words, position, U(NARROW))
    return (value << U(32)) | low_half, position


@kernel()
def about(value: Any, unit: Any) -> Any:
    """Ticks that surely pass before the coded one: the inverse of `surviving`, rounded down generously."""
    ticks = np.log2(float(unit) * 4294967296.0 / (float(value) + 1.0)) * 1048576.0 - 16.0
    return I(ticks) if ticks > 0.0 else I(0)


@kernel()
def pass_windows(value: Any, width: Any, words: Any, position: Any, survival: Any, wait: Any) -> Any:
    """Read the windows that pass without a change; `wait` falls by one window for each."""
    value, width, position = refill(value, width, words, position, U(WIDE))
    wall = surviving(survival, width >> U(32), U(WINDOW))
    while value < wall and position <= words.size + TAIL_WORDS:
        width = wall
        wait -= I(WINDOW)
        value, width, position = refill(value, width, words, position, U(WIDE))
        wall = surviving(survival, width >> U(32), U(WINDOW))
    return value, width, position, wait


@kernel()
def get_step(
    value: Any, width: Any, words: Any, position: Any, raw: Any, count: Any, odds: Any, seen: Any, rates: Any, base: Any
) -> Any:
    """The mirror of put_step; `count` turns negative when the raw bits run out."""
    length = I(0)
    more = True
    while more and length < MAX_LENGTH:
        value, width, position, more = get_bit(value, width, words, position, odds, seen, rates, base + length)
        length += I(more)
    size = U(1)
    if length >= 1:
        value, width, position, first = get_bit(
            value, width, words, position, odds, seen, rates, base + 32 + length
        )
        size = size * U(2) + U(first)
        if length >= 2:
            context = base + 64 + 2 * length + I(first)
            value, width, position, second = get_bit(value, width, words, position, odds, seen, rates, context)
            size = size * U(2) + U(second)
    rest = max(length - 2, I(0))
    if count + 1 + rest > 8 * raw.size:
        return value, width, position, I(-1), size, False
    negative = (raw[count >> I(3)] >> np.uint8(count & I(7))) & np.uint8(1) != np.uint8(0)
    count += 1
    below = U(0)
    for bit in range(rest):
        below |= U((raw[count >> I(3)] >> np.uint8(count & I(7))) & np.uint8(1)) << U(bit)
        count += 1
    return value, width, position, count, (size << U(rest)) | below, negative


@kernel()
def stepped(bits: Any, size: Any, down: Any, order: Any) -> Any:
    """The pattern `size` steps away, and whether the dtype has it."""
    key = key_of(bits, order[0], order[1], order[2])
    other = key - size if down else key + size
    inside = key >= size if down else other <= order[3]
    return bits_at(other & order[3], order[0], order[1], order[2]), inside


def get_listed(
    old: Any, new: Any, count: Any, back: Any, order: Any, weight: Any, survival: Any, waits: Any, rates: Any, odds: Any, seen: Any, steps: Any, raw: Any
) -> Any:  # fmt: skip
    """Decode `count` listed changes of `old` into `new`, steps turned round when `back`; returns 0 or what is wrong."""
    value, at_word = first_word(waits)
    step_value, at_step = first_word(steps)
    width = step_width = U(0xFFFFFFFFFFFFFFFF)
    bits = I(0)
    index = I(0)
    for _ in range(count):
        value, width, at_word, behind = pass_windows(value, width, waits, at_word, survival, I(0))
        if at_word > waits.size + TAIL_WORDS:
            return I(CUT_OFF)
        unit = width >> U(32)
        gap = (about(value, unit) - behind) // weight
        while True:
            start = max(gap * weight + behind, I(0))
            end = min(gap * weight + behind + weight, I(WINDOW))
            left = surviving(survival, unit, U(end))
            if left <= value or end == WINDOW:
                break
            gap += 1
        above = surviving(survival, unit, U(start))
        if value >= above or value < left:
            return I(NOT_A_CODE)
        value, width = value - left, above - left
        index += gap
        if index >= old.size:
            return I(PAST_THE_END)
        step_value, step_width, at_step, bits, size, down = get_step(
            step_value, step_width, steps, at_step, raw, bits, odds, seen, rates, I(0)
        )
        if bits < 0:
            return I(NO_SIGNS)
        after, inside = stepped(U(old[index]), size, down != back, order)
        if not inside:
            return I(LEAVES_DTYPE)
        new[index] = after
        index += 1
    if at_word > waits.size + TAIL_WORDS or at_step > steps.size + TAIL_WORDS:
        return I(CUT_OFF)
    if at_word < waits.size or at_step < steps.size or (bits + 7) // 8 != raw.size:
        return I(LEFT_OVER)
    return I(0)


def get_classed(
    old: Any, new: Any, count: Any, back: Any, shift: Any, classes: Any, order: Any, weights: Any, survival: Any,
    waits: Any, rates: Any, odds: Any, seen: Any, steps: Any, raw: Any
) -> Any:  # fmt: skip
    """Decode `count` classed changes of `old` into `new`, steps turned round when `back`; returns 0 or what is wrong."""
    value, at_word = first_word(waits)
    step_value, at_step = first_word(steps)
    width = step_width = U(0xFFFFFFFFFFFFFFFF)
    bits = I(0)
    index = I(0)
    whole_blocks = old.size - 7
    for _ in range(count):
        value, width, at_word, wait = pass_windows(value, width, waits, at_word, survival, I(0))
        if at_word > waits.size + TAIL_WORDS:
            return I(CUT_OFF)
        unit = width >> U(32)
        sure = about(value, unit)
        while index < whole_blocks:
            block = weights[U(old[index]) >> shift] + weights[U(old[index + 1]) >> shift]
            block += weights[U(old[index + 2]) >> shift] + weights[U(old[index + 3]) >> shift]
            block += weights[U(old[index + 4]) >> shift] + weights[U(old[index + 5]) >> shift]
            block += weights[U(old[index + 6]) >> shift] + weights[U(old[index + 7]) >> shift]
            if wait + I(block) > sure:
                break
            wait += I(block)
            index += 8
        left = value + U(1)
        end = wait
        while index < old.size:
            end = wait + I(weights[U(old[index]) >> shift])
            if end > sure:
                left = surviving(survival, unit, U(min(end, I(WINDOW))))
                if left <= value:
                    break
            wait = end
            index += 1
        if index >= old.size:
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
        after, inside = stepped(U(old[index]), size, down != back, order)
        if not inside:
            return I(LEAVES_DTYPE)
        if classes[after >> shift] != classes[group]:
            return I(LEAVES_CLASS)
        new[index] = after
        index += 1
    if at_word > waits.size + TAIL_WORDS or at_step > steps.size + TAIL_WORDS:
        return I(CUT_OFF)
    if at_word < waits.size or at_step < steps.size or (bits + 7) // 8 != raw.size:
        return I(LEFT_OVER)
    return I(0)


def count_groups(old: Any, new: Any, shift: Any, stride: Any, elements: Any, changes: Any, crossings: Any) -> Any:
    """Of one block of 4096 elements in `stride`: elements and changes by group, changes that leave the group; adds up."""
    start = I(0)
    while start < old.size:
        for index in range(start, min(start + I(4096), old.size)):
            group = U(old[index]) >> shift
            elements[group] += 1
            if old[index] != new[index]:
                changes[group] += 1
                crossings[0] += I(U(new[index]) >> shift != group)
        start += I(4096) * stride
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
    parts = f"{table}, {half}, {table}, {half}, {byte}, {half}, {byte}"

    def compiled(function: Callable[..., Any], *arguments: str) -> Callable[..., Any]:
        return kernel(f"({', '.join(arguments)})")(function)

    return Kernels(
        scan=compiled(scan, element, element, "uint64", byte, table, table, index, half, index),
        find=compiled(find, element, element, index),
        put_waits=compiled(put_waits, index, "int64", "uint64", table, half),
        put_steps=compiled(
            put_steps, element, element, index, "int64", "uint64", byte, table, table, half, byte, half, byte
        ),
        get_listed=compiled(get_listed, element, element, "int64", "boolean", table, "int64", parts),
        get_classed=compiled(
            get_classed, element, element, "int64", "boolean", "uint64", byte, table, table, parts
        ),
        count_groups=compiled(count_groups, element, element, "uint64", "int64", count, count, count),
    )
