"""A second implementation of the encoders of sparse and dense frames (docs/spec/patch.md, sections 3 and 4) in plain
Python integers: slow and simple. The kernels are compared with it.
"""

from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from protocol.patch.values import Layout

HALF_LIFE = 1 << 20
SLOTS = 1 << 12
MIN_STATE = 1 << 16
PRECISE = 512


def roots() -> list[int]:
    """Compute floor(2^64 * 2^(-2^-j)) for j from 1 to 20."""
    precise, result = 1 << PRECISE, []
    root = precise // 2
    for _ in range(20):
        root = isqrt(root * precise)
        result.append(root >> (PRECISE - 64))
    return result


ROOTS = roots()


def survivors(ticks: int) -> int:
    """Compute how many of 2^32 gaps are longer than `ticks`."""
    value = 1 << 64
    for j, root in enumerate(ROOTS, 1):
        if ticks >> (20 - j) & 1:
            value = value * root >> 64
    return value >> 32 + ticks // HALF_LIFE


def bucket_bits(weight: int) -> int:
    """Return the largest k for which 2^k elements have at most 6 * 2^16 ticks, or 0."""
    return max([k for k in range(20) if weight << k <= 6 << 16], default=0)


def gap_widths(weight: int) -> list[int]:
    """Return the slots of each bucket, and last those of all longer gaps."""
    span = weight << bucket_bits(weight)
    buckets = max(1, min(31, 12 * HALF_LIFE // span))
    edges = [0]
    for i in range(1, buckets + 1):
        edge = SLOTS - survivors(i * span) // (1 << 20)
        edges.append(max(edges[-1] + 1, min(edge, SLOTS - 1 - buckets + i)))
    edges.append(SLOTS)
    return [edges[i + 1] - edges[i] for i in range(buckets + 1)]


def step_widths(weights: list[int]) -> list[int]:
    """Return the slots of each symbol, in proportion to the weights."""
    widths = [1 + weight * (SLOTS - len(weights)) // sum(weights) for weight in weights]
    widths[weights.index(max(weights))] += SLOTS - sum(widths)
    return widths


def key_of(bits: int, layout: Layout) -> int:
    top = 1 << (layout.bits - 1)
    if layout.is_float:
        return (2 * top - 1) - bits if bits & top else bits + top
    return bits ^ top if layout.is_signed else bits


def class_of(bits: int, layout: Layout, first: int, classes: int) -> int:
    exponent = (bits >> layout.mantissa) % layout.exponents
    return min(max(exponent - first, 0), classes - 1)


def symbol_of(size: int) -> tuple[int, int]:
    """Return the symbol of a size, and how many of the size's low bits the symbol does not determine."""
    length = size.bit_length() - 1
    if length < 2:
        return size - 1, 0
    return 3 + 4 * (length - 2) + (size >> (length - 2)) % 4, length - 2


@dataclass
class Group:
    """The changes of one class, or of all elements: the weights of its tables, and (gap, down, size) of each."""

    weight: int
    steps: list[int]
    changes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Stack:
    """The encoder's two states, and the words that it has written, from the last to the first."""

    states: dict[Any, int] = field(default_factory=lambda: {"gap": MIN_STATE, "step": MIN_STATE})
    words: list[int] = field(default_factory=list)

    def push(self, name: Any, widths: list[int], symbol: int) -> None:
        state, width, begin = self.states[name], widths[symbol], sum(widths[:symbol])
        if state >= width << 20:
            self.words.append(state % (1 << 16))
            state >>= 16
        self.states[name] = state // width * SLOTS + begin + state % width

    def finish(self) -> list[int]:
        for name in reversed(self.states):
            for word in range(2):
                self.words.append(self.states[name] >> (16 * word) & 0xFFFF)
        return self.words[::-1]


def find_changes(old: list[int], new: list[int], layout: Layout, first: int, groups: list[Group]) -> None:
    """Sort the changes of a chunk into the groups of their classes; without classes, there is one."""
    gaps = [0] * len(groups)
    for before, after in zip(old, new, strict=True):
        own = class_of(before, layout, first, len(groups))
        if before != after:
            step = key_of(after, layout) - key_of(before, layout)
            groups[own].changes.append((gaps[own], int(step < 0), abs(step)))
            gaps[own] = 0
        else:
            gaps[own] += 1


def encode_chunk(groups: list[Group]) -> tuple[list[int], bytes]:
    """Encode the changes of a chunk; return its words and its raw bits."""
    stack, raw = Stack(), []
    for group in groups:
        bucket = bucket_bits(group.weight)
        for gap, down, size in group.changes:
            raw += [down, *(gap >> i & 1 for i in range(bucket))]
            symbol, rest = symbol_of(size)
            if symbol >= len(group.steps) - 1:
                rest = size.bit_length() - 1
                raw += [rest >> i & 1 for i in range(5)]
            raw += [size >> i & 1 for i in range(rest)]
    for group in reversed(groups):
        gaps, steps = gap_widths(group.weight), step_widths(group.steps)
        beyond = len(gaps) - 1
        for gap, _, size in reversed(group.changes):
            stack.push("step", steps, min(symbol_of(size)[0], len(steps) - 1))
            bucket = gap >> bucket_bits(group.weight)
            stack.push("gap", gaps, bucket % beyond)
            for _ in range(bucket // beyond):
                stack.push("gap", gaps, beyond)
    packed_bits = bytearray((len(raw) + 7) // 8)
    for index, bit in enumerate(raw):
        packed_bits[index // 8] |= bit << index % 8
    return stack.finish(), bytes(packed_bits)


def dense_widths(unchanged: int, growing: int, steps: list[int]) -> list[int]:
    """Return the slots of all symbols of a class of a dense frame; 0 is the weight of a step that does not occur."""
    weights = [unchanged, 0]
    for weight in steps:
        up = max(1, weight * growing // 256)
        weights += [up, max(1, weight - up)] if weight else [0, 0]
    present = [number for number, weight in enumerate(weights) if weight]
    widths = dict(zip(present, step_widths([weights[number] for number in present]), strict=True))
    return [widths.get(number, 0) for number in range(len(weights))]


def encode_dense_chunk(
    old: list[int], new: list[int], layout: Layout, first: int, tables: list[list[int]]
) -> tuple[list[int], bytes]:
    """Encode a chunk of a dense frame by the slots of each class; return its words and its raw bits."""
    stack, raw = Stack(dict.fromkeys(range(8), MIN_STATE)), []
    symbols = []
    for before, after in zip(old, new, strict=True):
        step = key_of(after, layout) - key_of(before, layout)
        minus = layout.is_float and before >> (layout.bits - 1) == 1
        symbol, rest = symbol_of(abs(step)) if step else (0, 0)
        symbols.append(2 * symbol + 2 + int((step < 0) != minus) if step else 0)
        raw += [abs(step) >> i & 1 for i in range(rest)]
    for index in reversed(range(len(old))):
        own = class_of(old[index], layout, first, len(tables)) if layout.is_float else 0
        stack.push(index % 8, tables[own], symbols[index])
    packed_bits = bytearray((len(raw) + 7) // 8)
    for index, bit in enumerate(raw):
        packed_bits[index // 8] |= bit << index % 8
    return stack.finish(), bytes(packed_bits)
