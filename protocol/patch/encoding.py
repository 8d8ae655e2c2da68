"""The encoder's hot loops: scan, waits, steps (docs/spec/patch.md, section 3). One machine-code version for each element width.

A change is *listed* (its wait counted in elements, all alike) when its class differs before and after, *classed* otherwise (its
wait counted in ticks, each element as many as its class is likely to change). Elements are compared a 64-bit word at a time;
table look-ups stay scalar, because gather instructions are many times slower on processors with the fix for gather data
sampling. What can go either way is computed without a branch: a wrong guess costs as much as the whole rest of a change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from protocol.patch.jit import kernel
from protocol.patch.rangecoder import CONTEXTS, FULL, MAX_LENGTH, NARROW, WIDE, WINDOW, I, U, key_of, surviving

OUT_OF_ROOM: Final = -1
"""The changes need more bytes than the elements themselves."""


@kernel()
def widen(low: Any, width: Any, out: Any, position: Any, least: Any) -> Any:
    """Write words until the interval is at least `least` wide; the first of them without a branch to guess."""
    out[position] = low >> U(48)
    narrow = U(width < least)
    position += I(narrow)
    low = low << (narrow << U(4))
    width = width << (narrow << U(4))
    while width < least:
        out[position] = low >> U(48)
        position += 1
        low = low << U(16)
        width = width << U(16)
    return low, width, position


@kernel()
def advance(low: Any, distance: Any, out: Any, position: Any) -> Any:
    """low + distance; a carry runs into the words already written."""
    total = low + distance
    if total < low:
        back = position - 1
        while back >= 0:
            out[back] += np.uint16(1)
            if out[back] != np.uint16(0):
                break
            back -= 1
    return total


@kernel()
def put_wait(low: Any, width: Any, out: Any, position: Any, survival: Any, start: Any, weight: Any) -> Any:
    """Code that the change falls on the element that spans ticks [start, start + weight)."""
    low, width, position = widen(low, width, out, position, U(WIDE))
    while start >= U(WINDOW):
        if position + 8 > out.size:
            return low, width, position
        width = (width >> U(32)) << U(16)
        low, width, position = widen(low, width, out, position, U(WIDE))
        start -= U(WINDOW)
    unit = width >> U(32)
    end = min(start + weight, U(WINDOW))
    left = surviving(survival, unit, end)
    low = advance(low, left, out, position)
    return low, surviving(survival, unit, start) - left, position


@kernel()
def put_bit(
    low: Any, width: Any, out: Any, position: Any, odds: Any, seen: Any, rates: Any, context: Any, bit: Any
) -> Any:
    """Code one bit by its context's odds, which learn from it."""
    low, width, position = widen(low, width, out, position, U(NARROW))
    odd = U(odds[context])
    split = (width >> U(16)) * odd
    count = seen[context]
    if bit:
        width = split
        odd = min(odd + (((U(65536) - odd) * rates[count]) >> U(16)), U(65504))
    else:
        low = advance(low, split, out, position)
        width -= split
        odd = max(odd - ((odd * rates[count]) >> U(16)), U(32))
    odds[context] = odd
    if count < 255:
        seen[context] = count + 1
    return low, width, position


@kernel()
def finish(low: Any, width: Any, out: Any, position: Any) -> Any:
    """Write the fewest words that name a number of the interval; returns the section's length in words."""
    for keep in range(5):
        drop = U(64 - 16 * keep)
        if keep == 0:
            distance = U(0) - low
        elif keep == 4:
            distance = U(0)
        else:
            distance = (U(0) - low) & ((U(1) << drop) - U(1))
        if distance < width:
            break
    low = advance(low, distance, out, position)
    for word in range(keep):
        out[position + word] = low >> U(48)
        low = low << U(16)
    while keep > 0 and out[position + keep - 1] == 0:
        keep -= 1
    return position + keep


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
def distance(before: Any, after: Any) -> Any:
    """How far apart two places are, and whether the way goes down."""
    down = U(after < before)
    return ((after - before) ^ (U(0) - down)) + down, down


@kernel()
def skip(
    old_words: Any, new_words: Any, weights: Any, number: Any, wait: Any, lanes: Any, shift: Any, mask: Any
) -> Any:
    """On to the first word that differs; the elements passed over add their weights to the wait."""
    at, words = U(number), U(old_words.size)
    while at < words and old_words[at] == new_words[at]:
        groups = old_words[at] >> U(shift)
        for _ in range(lanes):
            wait += weights[groups & U(mask)]
            groups >>= U(64 // lanes)
        at += U(1)
    return I(at), wait


def scanner(lanes: int, shift: int) -> Callable[..., tuple[int, int, int]]:
    """`scan` for words of `lanes` elements whose groups begin at bit `shift`: as constants these cost no registers."""
    bits = 64 // lanes
    element = (1 << bits) - 1
    mask = element >> shift

    def scan(
        old: Any, new: Any, old_words: Any, new_words: Any, classes: Any, weights: Any, survival: Any,
        out: Any, at: Any, listed: Any, classed: Any
    ) -> Any:  # fmt: skip
        """Find the changes; code the waits of those that keep their class, note the others.

        Args:
            at: room for the indices of the listed changes.
            listed, classed: room for the old and the new patterns of the changes of each kind: [2, elements].

        Returns:
            changes listed, changes classed, words of `out` (or OUT_OF_ROOM).
        """
        low, width, position = U(0), U(FULL), I(0)
        wait = U(0)
        n_listed, n_classed = I(0), I(0)
        room = out.size - 16
        number = I(0)
        while number <= old_words.size:
            number, wait = skip(old_words, new_words, weights, number, wait, lanes, shift, mask)
            if number < old_words.size:
                before, after = old_words[number], new_words[number]
            else:
                before, after = U(0), U(0)
                for lane in range(old.size - number * lanes):
                    before |= U(old[number * lanes + lane]) << U(lane * bits)
                    after |= U(new[number * lanes + lane]) << U(lane * bits)
            for lane in range(lanes):
                was, becomes = before & U(element), after & U(element)
                before >>= U(bits)
                after >>= U(bits)
                group = was >> U(shift)
                if was == becomes:
                    wait += weights[group]
                elif classes[group] != classes[becomes >> U(shift)]:
                    at[n_listed] = number * lanes + lane
                    listed[0, n_listed], listed[1, n_listed] = was, becomes
                    n_listed += I(1)
                else:
                    low, width, position = put_wait(low, width, out, position, survival, wait, weights[group])
                    if position > room:
                        return n_listed, n_classed, I(OUT_OF_ROOM)
                    classed[0, n_classed], classed[1, n_classed] = was, becomes
                    n_classed += I(1)
                    wait = U(0)
            number += I(1)
        return n_listed, n_classed, finish(low, width, out, position)

    return scan


def finder(lanes: int) -> Callable[..., int]:
    """`find` for words of `lanes` elements."""
    bits = 64 // lanes
    element = (1 << bits) - 1

    def find(old: Any, new: Any, old_words: Any, new_words: Any, at: Any, listed: Any) -> Any:
        """The indices of all changes, into `at`, their old and new patterns into `listed`; returns how many.

        Both have room for every element.
        """
        count = U(0)
        for number in range(old_words.size):
            before, after = old_words[number], new_words[number]
            if before != after:
                for lane in range(lanes):
                    was, becomes = before >> U(lane * bits) & U(element), after >> U(lane * bits) & U(element)
                    at[count] = U(number) * U(lanes) + U(lane)
                    listed[U(0), count], listed[U(1), count] = was, becomes
                    count += U(was != becomes)
        for index in range(old_words.size * lanes, old.size):
            at[count] = index
            listed[U(0), count], listed[U(1), count] = old[index], new[index]
            count += U(old[index] != new[index])
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
    changes: Any, count: Any, shift: Any, classes: Any, order: Any, rates: Any, odds: Any, seen: Any, out: Any, raw: Any
) -> Any:
    """Code the steps of the first `count` of `changes` ([2, elements]); returns words and raw bits, or OUT_OF_ROOM."""
    low, width, position = U(0), U(FULL), I(0)
    bits = I(0)
    room = out.size - 64
    room_bits = I(8) * raw.size - I(64)
    for number in range(count):
        before = U(changes[0, number])
        size, negative = distance(key_of(before, order), key_of(U(changes[1, number]), order))
        base = I(classes[before >> shift]) * I(CONTEXTS)
        low, width, position, bits = put_step(
            low, width, out, position, raw, bits, odds, seen, rates, base, size, negative
        )
        if position > room or bits > room_bits:
            return I(OUT_OF_ROOM), bits
    return finish(low, width, out, position), bits


def count_classes(
    old: Any, new: Any, shift: Any, stride: Any, classes: Any, order: Any, elements: Any, lengths: Any, crossings: Any
) -> Any:
    """Statistics of one block of 4096 elements in `stride`, added up by class.

    Args:
        classes: class by group (sign and exponent): uint8[groups].
        elements: int64[256], all elements.
        lengths: int64[256 * 32], changes that keep their class, by the length of their step.
        crossings: int64[256], changes that leave it.
    """
    for start in range(I(0), old.size, I(4096) * stride):
        for index in range(U(start), U(min(start + I(4096), old.size))):
            before, after = U(old[index]), U(new[index])
            group = U(classes[before >> shift])
            elements[group] += 1
            if before == after:
                continue
            if U(classes[after >> shift]) != group:
                crossings[group] += 1
                continue
            size, _ = distance(key_of(before, order), key_of(after, order))
            length = U(0)
            while (size >> (length + U(1))) != U(0):
                length += U(1)
            lengths[group * U(32) + length] += 1
    return I(0)


@dataclass(frozen=True, slots=True)
class Coders:
    """The encoder's kernels of one element width."""

    scan: Callable[..., tuple[int, int, int]]
    find: Callable[..., int]
    put_waits: Callable[..., int]
    put_steps: Callable[..., tuple[int, int]]
    count_classes: Callable[..., int]


@cache
def coders_for(itemsize: int, shift: int) -> Coders:
    """Compile the kernels for elements of `itemsize` bytes and groups at bit `shift`, or load them from numba's cache."""
    element, byte, half, index, table, count = (
        f"uint{8 * itemsize}[::1]", "uint8[::1]", "uint16[::1]", "uint32[::1]", "uint64[::1]", "int64[::1]",
    )  # fmt: skip
    lanes = 8 // itemsize
    words = (element, element, table, table)
    changes = f"uint{8 * itemsize}[:, ::1]"
    adaptive = (table, half, byte)
    return Coders(
        scan=kernel(*words, byte, table, table, half, index, changes, changes)(scanner(lanes, shift)),
        find=kernel(*words, index, changes)(finder(lanes)),
        put_waits=kernel(index, "int64", "uint64", table, half)(put_waits),
        put_steps=kernel(changes, "int64", "uint64", byte, table, *adaptive, half, byte)(put_steps),
        count_classes=kernel(element, element, "uint64", "int64", byte, table, count, count, count)(count_classes),
    )
