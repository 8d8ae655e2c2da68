"""Seeded mutations of patches, as a hostile store could serve them, and all parsers of patches."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from protocol import patch
from protocol.compression import compress, decompress
from protocol.digest import digest_weights
from protocol.patch.container import PREAMBLE, read_header


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a mutated copy: a bit flip, or bytes that are replaced, cut off, copied, inserted or deleted."""
    mutation = bytearray(data)
    kind = int(rng.integers(0, 6))
    at = int(rng.integers(0, len(mutation)))
    if kind == 0:
        mutation[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        mutation[at] = int(rng.choice((0, 1, 0x7F, 0x80, 0xFF)))
    elif kind == 2:
        del mutation[at:]
    elif kind == 3:
        other = int(rng.integers(0, len(mutation)))
        length = int(rng.integers(1, 16))
        mutation[at : at + length] = data[other : other + length]
    elif kind == 4:
        mutation[at:at] = rng.bytes(int(rng.integers(1, 9)))
    else:
        del mutation[at : at + int(rng.integers(1, 9))]
    return bytes(mutation)


def mutate_frames(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a mutated copy with a valid table, whose mutations reach the parsers of frames."""
    begin = read_header(data).frames_begin
    mutation = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(begin, len(mutation)))
        mutation[at] = int(rng.integers(0, 256))
    return bytes(mutation)


def mutate_table(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a mutated copy with a table that can be unpacked, whose mutations reach the parser of the table."""
    magic, profile, packed_size, base, result = PREAMBLE.unpack_from(data)
    table = bytearray(decompress(data[PREAMBLE.size : PREAMBLE.size + packed_size], 1 << 20))
    for _ in range(int(rng.integers(1, 4))):
        table[int(rng.integers(0, len(table)))] = int(rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, int(rng.integers(256)))))
    packed_table = compress(bytes(table))
    return (
        PREAMBLE.pack(magic, profile, len(packed_table), base, result)
        + packed_table
        + data[PREAMBLE.size + packed_size :]
    )


MUTATORS = {"anywhere": mutate, "frames": mutate_frames, "table": mutate_table}


def mutations(data: bytes, kind: str, seed: int, count: int) -> Iterator[bytes]:
    """Yield `count` mutated copies of one patch."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield MUTATORS[kind](data, rng)


Weights = dict[str, torch.Tensor]


def corpus() -> dict[str, tuple[Weights, bytes]]:
    """Return weights and a patch for them, for each code path of the parsers."""
    rng = torch.Generator().manual_seed(1)
    masters = torch.randn((40, 64), generator=rng) * 0.0147
    updates = torch.randn((40, 64), generator=rng)
    newer = masters + updates * 2e-5
    noise = [torch.randint(-(2**31), 2**31 - 1, (64,), generator=rng, dtype=torch.int64).int() for _ in range(2)]
    old, new = masters.bfloat16(), (masters + updates * 3e-6).bfloat16()
    cases: dict[str, tuple[Weights, Weights, str]] = {
        "compact": ({"a": old, "b": old.clone()}, {"a": new, "b": old.clone()}, "compact"),
        "fast": ({"a": old}, {"a": new}, "fast"),
        "raw": ({"a": noise[0]}, {"a": noise[1]}, "compact"),
        "values": ({"a": masters}, {"a": torch.zeros_like(masters)}, "compact"),
        "steps": ({"a": masters}, {"a": newer}, "fast"),
        "rows": (
            {"a": old.repeat(4, 1)},
            {"a": torch.where(torch.arange(160)[:, None] % 9 == 0, new.repeat(4, 1), old.repeat(4, 1))},
            "compact",
        ),
        "dense": (
            {"a": old.repeat(8, 1), "b": old},
            {"a": (1.01 * masters).bfloat16().repeat(8, 1), "b": new},
            "compact",
        ),
        "small_changes": ({"a": old}, {"a": torch.where(torch.arange(64) < 63, old, new)}, "compact"),
        "bytes": ({"a": masters.to(torch.float8_e4m3fn)}, {"a": newer.to(torch.float8_e4m3fn)}, "compact"),
    }
    return {name: (a, patch.encode(a, b, profile=profile)) for name, (a, b, profile) in cases.items()}


def parsers(weights: Weights) -> dict[str, Callable[[bytes], object]]:
    """Return all functions that parse patches, by name, for a node with these weights."""
    return {
        "apply": lambda mutation: digest_weights(patch.apply(weights, mutation)),
        "summary": patch.summary,
        "stream": lambda mutation: patch.StreamingApply(weights).feed(mutation),
    }
