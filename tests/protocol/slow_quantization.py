"""Quantization as docs/spec/quantized.md states it, in exact fractions, one weight after the other."""

from fractions import Fraction
from typing import Final

LARGEST: Final = {"fp8": 448, "int8": 127}


def value_of(pattern: int, precision: str) -> Fraction | None:
    """Return the value of a code; None if the bit pattern is none."""
    if precision == "int8":
        return None if pattern == 0x80 else Fraction(pattern - 256 if pattern > 0x80 else pattern)
    sign, exponent, fraction = pattern >> 7, pattern >> 3 & 15, pattern & 7
    if exponent == 15 and fraction == 7:
        return None
    normal, subnormal = Fraction(2) ** (exponent - 7) * (1 + Fraction(fraction, 8)), Fraction(fraction, 8) / 64
    magnitude = normal if exponent else subnormal
    return -magnitude if sign else magnitude


def exponent_of(row: list[Fraction], precision: str) -> int:
    """Return e of a row's scale 2^e."""
    largest = max(abs(weight) for weight in row)
    exponent = -64
    while largest > LARGEST[precision] * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def code_of(weight: Fraction, exponent: int, precision: str) -> int:
    """Return the bit pattern of a weight's code."""
    scaled = weight / Fraction(2) ** exponent
    best: tuple[Fraction, int, int] | None = None
    for pattern in range(256):
        value = value_of(pattern, precision)
        if value is None or (precision == "fp8" and pattern == 0x80):
            continue
        candidate = abs(value - scaled), pattern & 1, pattern
        best = candidate if best is None else min(best, candidate)
    assert best is not None
    return best[2]
