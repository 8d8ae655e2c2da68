"""A second implementation of docs/spec/sampling.md in plain Python integers: slow and simple."""

import math
from functools import cache

WORD = 0xFFFFFFFF


def mix(x: int) -> int:
    x ^= x >> 17
    x = x * 0xED5AD4BB & WORD
    x ^= x >> 11
    x = x * 0xAC4C1B51 & WORD
    x ^= x >> 15
    x = x * 0x31848BAB & WORD
    return x ^ (x >> 14)


def word(seed: bytes, position: int, token: int) -> int:
    s = [int.from_bytes(seed[place : place + 4], "little") for place in (0, 4, 8, 12)]
    key = mix(mix(s[0] ^ position) ^ s[1])
    other = mix(mix((key + 0x9E3779B9 + s[2]) & WORD) ^ s[3])
    return mix(mix(token ^ key) ^ other)


@cache
def entry(row: int, index: int) -> int:
    u = min((1 + index % 256 / 256) * 2.0 ** (index // 256 - 33), 0.5)
    return round(-math.log(-(math.log(u) if row == 0 else math.log1p(-u))) * 2**19)


def units(h: int) -> int:
    """Return the noise of a word, in units of 2**-19."""
    row = int(h >= 1 << 31)
    n = 2 * (WORD - h if row else h) + 1
    octave = n.bit_length() - 1
    f = (n << (52 - octave)) - (1 << 52)
    index, fraction = octave * 256 + (f >> 44), (f >> 24) & 0xFFFFF
    low, high = entry(row, index), entry(row, index + 1)
    return low + (high - low) * fraction // (1 << 20)


def noise(seed: bytes, position: int, token: int) -> float:
    return units(word(seed, position, token)) * 2.0**-19
