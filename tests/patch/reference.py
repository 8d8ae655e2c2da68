"""The sparse coder of docs/spec/patch.md, section 3, in plain Python integers: slow and obvious. Kernels are compared with it."""

from dataclasses import dataclass, field

from protocol.patch.values import Layout

HALF_LIFE = 1 << 20
WINDOW = 16 * HALF_LIFE


def integer_root(value: int, power_of_two: int) -> int:
    """floor(value ** (1 / 2**power_of_two))."""
    from math import isqrt

    for _ in range(power_of_two):
        value = isqrt(value)
    return value


SURVIVAL = [integer_root(1 << (32 * 1024 - index), 10) for index in range(1025)]


def surviving(unit: int, ticks: int) -> int:
    """R(ticks) of an interval of unit * 2^32."""
    index, rest = (ticks >> 10) & 1023, ticks & 1023
    level = SURVIVAL[index] - ((SURVIVAL[index] - SURVIVAL[index + 1]) * rest >> 10)
    return unit * level >> (ticks >> 20)


def order(bits: int, layout: Layout) -> int:
    """A pattern's place."""
    top = 1 << (layout.bits - 1)
    if layout.is_float:
        return (2 * top - 1) - bits if bits & top else bits + top
    return bits ^ top if layout.signed else bits


def pattern(key: int, layout: Layout) -> int:
    """The pattern at a place."""
    top = 1 << (layout.bits - 1)
    if layout.is_float:
        return key - top if key & top else (2 * top - 1) - key
    return key ^ top if layout.signed else key


@dataclass
class Writer:
    """The encoder's interval, as an exact integer: the code so far is `low` after `words` shifts of 16 bits."""

    low: int = 0
    width: int = (1 << 64) - 1
    words: int = 0

    def narrow(self, begin: int, width: int) -> None:
        self.low += begin
        self.width = width

    def widen(self, least: int) -> None:
        while self.width < least:
            self.low <<= 16
            self.width <<= 16
            self.words += 1

    def wait(self, start: int, weight: int) -> None:
        self.widen(1 << 48)
        while start >= WINDOW:
            self.narrow(0, (self.width >> 32) << 16)
            self.widen(1 << 48)
            start -= WINDOW
        unit = self.width >> 32
        left = surviving(unit, min(start + weight, WINDOW))
        self.narrow(left, surviving(unit, start) - left)

    def bit(self, adaptive: "Adaptive", context: int, bit: bool) -> None:
        self.widen(1 << 32)
        split = (self.width >> 16) * adaptive.odds[context]
        self.narrow(0 if bit else split, split if bit else self.width - split)
        adaptive.learn(context, bit)

    def finish(self) -> list[int]:
        for keep in range(5):
            unit = 1 << (64 - 16 * keep)
            value = -(-self.low // unit) * unit
            if value < self.low + self.width:
                break
        total = 16 * (self.words + 4)
        words = [value >> (total - 16 * (i + 1)) & 0xFFFF for i in range(self.words + keep)]
        while len(words) > self.words and words[-1] == 0:
            words.pop()
        return words


@dataclass
class Adaptive:
    """Odds and observations of the adaptive bits."""

    odds: list[int]
    seen: list[int]

    def learn(self, context: int, bit: bool) -> None:
        odd, rate = self.odds[context], 655360 // (10 * self.seen[context] + 16)
        odd = min(odd + ((65536 - odd) * rate >> 16), 65504) if bit else max(odd - (odd * rate >> 16), 32)
        self.odds[context] = odd
        self.seen[context] = min(255, self.seen[context] + 1)


@dataclass
class Part:
    """Waits, steps and raw bits of the changes of one kind."""

    waits: Writer = field(default_factory=Writer)
    steps: Writer = field(default_factory=Writer)
    raw: list[int] = field(default_factory=list)
    count: int = 0

    def step(self, adaptive: Adaptive, base: int, before: int, after: int) -> None:
        self.count += 1
        size = abs(after - before)
        self.raw.append(int(after < before))
        length = size.bit_length() - 1
        for number in range(min(length + 1, 31)):
            self.steps.bit(adaptive, base + number, number < length)
        if length >= 1:
            first = size >> (length - 1) & 1
            self.steps.bit(adaptive, base + 32 + length, bool(first))
            if length >= 2:
                self.steps.bit(adaptive, base + 64 + 2 * length + first, bool(size >> (length - 2) & 1))
        self.raw += [size >> bit & 1 for bit in range(length - 2)]

    def raw_bytes(self) -> bytes:
        packed = bytearray((len(self.raw) + 7) // 8)
        for index, bit in enumerate(self.raw):
            packed[index // 8] |= bit << index % 8
        return bytes(packed)


def encode_chunk(
    old: list[int], new: list[int], layout: Layout, classes: list[int], weights: list[int], listed_weight: int,
    adaptive: Adaptive, plain: Adaptive,
) -> tuple[Part, Part]:  # fmt: skip
    """The listed and the classed part of one chunk; classes and weights by group, no weights when all changes are listed."""
    listed, classed = Part(), Part()
    passed = wait = 0
    for before, after in zip(old, new, strict=True):
        group, next_group = before >> layout.group_shift, after >> layout.group_shift
        keys = order(before, layout), order(after, layout)
        in_list = before != after and (not weights or classes[group] != classes[next_group])
        if in_list:
            listed.waits.wait(passed * listed_weight, listed_weight)
            listed.step(plain, 0, *keys)
        elif before != after:
            classed.waits.wait(wait, weights[group])
            classed.step(adaptive, 128 * classes[group], *keys)
            wait = 0
        elif weights:
            wait += weights[group]
        passed = 0 if in_list else passed + 1
    return listed, classed
