"""Ways to break a patch, seeded: what a hostile store could serve."""

from collections.abc import Iterator

import numpy as np

from protocol.compression import compress, decompress
from protocol.patch.container import PREAMBLE, read_header


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """One broken copy: bits flipped, bytes set, cut, spliced, doubled or dropped."""
    out = bytearray(data)
    kind = int(random.integers(0, 6))
    at = int(random.integers(0, len(out)))
    if kind == 0:
        out[at] ^= 1 << int(random.integers(0, 8))
    elif kind == 1:
        out[at] = int(random.choice((0, 1, 0x7F, 0x80, 0xFF)))
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        other = int(random.integers(0, len(out)))
        length = int(random.integers(1, 16))
        out[at : at + length] = data[other : other + length]
    elif kind == 4:
        out[at:at] = random.bytes(int(random.integers(1, 9)))
    else:
        del out[at : at + int(random.integers(1, 9))]
    return bytes(out)


def mutate_frames(data: bytes, random: np.random.Generator) -> bytes:
    """One broken copy whose table stays whole, so that the frames' parsers meet the damage."""
    begin = read_header(data).frames_begin
    out = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(begin, len(out)))
        out[at] = int(random.integers(0, 256))
    return bytes(out)


def mutate_table(data: bytes, random: np.random.Generator) -> bytes:
    """One broken copy with a table that still unpacks: the table's own parser meets the damage."""

    magic, profile, packed, base, result = PREAMBLE.unpack_from(data)
    table = bytearray(decompress(data[PREAMBLE.size : PREAMBLE.size + packed], 1 << 20))
    for _ in range(int(random.integers(1, 4))):
        table[int(random.integers(0, len(table)))] = int(
            random.choice((0, 1, 2, 0x7F, 0x80, 0xFF, int(random.integers(256))))
        )
    repacked = compress(bytes(table))
    return PREAMBLE.pack(magic, profile, len(repacked), base, result) + repacked + data[PREAMBLE.size + packed :]


MUTATORS = {"anywhere": mutate, "frames": mutate_frames, "table": mutate_table}


def mutations(data: bytes, kind: str, seed: int, count: int) -> Iterator[bytes]:
    """`count` broken copies of one patch."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield MUTATORS[kind](data, random)
