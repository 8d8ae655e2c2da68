"""Hostile bytes give a value or a ProtocolError in bounded memory, and leave the weights unchanged."""

import struct
import tracemalloc

import numpy as np
import pytest
import torch

from protocol import limits, patch
from protocol.compression import compress
from protocol.errors import LimitError, MalformedError, PatchError, ProtocolError
from protocol.patch.container import PREAMBLE
from protocol.patch.fields import varint
from tests.patch.weights import from_bits, rounded_update, same_bits
from tests.support.faults.patch_mutations import MUTATORS, mutations

MUTATIONS_PER_CASE = 1500


def corpus() -> dict[str, tuple[dict[str, torch.Tensor], bytes]]:
    """Return small weights and a patch for them, for each path through the parsers."""
    old, new = rounded_update(40, 64, 20.0, seed=1)
    random = np.random.default_rng(2)
    noise = [from_bits(random.integers(0, 1 << 32, 64, dtype=np.uint64), torch.float32, (8, 8)) for _ in range(2)]
    cases = {
        "compact": ({"a": old, "b": old}, {"a": new, "b": old}, "compact"),
        "fast": ({"a": old}, {"a": new}, "fast"),
        "raw planes": ({"a": noise[0]}, {"a": noise[1]}, "compact"),
        "planes": ({"a": old.float()}, {"a": torch.zeros_like(old.float())}, "compact"),
        "small changes": ({"a": old}, {"a": torch.where(torch.arange(64) < 63, old, new)}, "compact"),
        "bytes": ({"a": old.to(torch.float8_e4m3fn)}, {"a": (old * 1.3).to(torch.float8_e4m3fn)}, "compact"),
    }
    return {name: (a, patch.encode(a, b, profile=profile)) for name, (a, b, profile) in cases.items()}


CORPUS = corpus()


@pytest.mark.parametrize("kind", sorted(MUTATORS))
@pytest.mark.parametrize("case", sorted(CORPUS))
def test_mutated_patches_are_refused(case, kind):
    weights, data = CORPUS[case]
    before = {name: tensor.clone() for name, tensor in weights.items()}
    for seed, mutant in enumerate(mutations(data, kind, 7, MUTATIONS_PER_CASE)):
        try:
            result = patch.apply(weights, mutant)
        except ProtocolError:
            continue
        assert same_bits(result, patch.apply(weights, data)), f"mutation {seed} was applied as another patch"
    assert same_bits(weights, before)


@pytest.mark.parametrize("case", sorted(CORPUS))
def test_other_parsers_raise_only_protocol_errors(case):
    weights, data = CORPUS[case]
    for kind in sorted(MUTATORS):
        for mutant in mutations(data, kind, 8, 150):
            for use in (
                patch.summary,
                lambda b: patch.StreamingApply(weights).feed(b),
            ):
                try:
                    use(mutant)
                except ProtocolError:
                    continue


def table_of(rows: bytes, count: int = 1) -> bytes:
    packed_table = compress(varint(count) + rows)
    return PREAMBLE.pack(b"GRP1", 0, len(packed_table), bytes(32), bytes(32)) + packed_table


def row(name: bytes, elements: int, mode: int = 1, changes: int = 1, size: int = 0) -> bytes:
    head = varint(len(name)) + name + bytes((0, 1)) + varint(elements) + bytes((mode,))
    return head if mode == 0 else head + varint(changes) + varint(size) + bytes(8)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedError),
        (b"GRP2" + bytes(72), MalformedError),
        (PREAMBLE.pack(b"GRP1", 0, 2**32 - 1, bytes(32), bytes(32)), LimitError),
        (PREAMBLE.pack(b"GRP1", 9, 0, bytes(32), bytes(32)), MalformedError),
        (table_of(row(b"w", 1 << 62)), LimitError),
        (table_of(row(b"w", 10, changes=11)), PatchError),
        (table_of(row(b"w", 10, changes=0)), PatchError),
        (table_of(row(b"w", 10, size=10**9)), PatchError),
        (table_of(row(b"w", 10, mode=0) * 2, 2), MalformedError),
        (table_of(row(b"x", 10, mode=0) + row(b"w", 10, mode=0), 2), MalformedError),
        (table_of(row(b"\xff", 10, mode=0)), MalformedError),
        (table_of(row(b"w" * 513, 10, mode=0)), LimitError),
        (table_of(row(b"w", 10, mode=7)), MalformedError),
        (table_of(b"", 1 << 30), LimitError),
        (table_of(row(b"w", 10, mode=0)) + b"x", MalformedError),
        (table_of(row(b"w", 10, mode=0) + b"x"), MalformedError),
    ],
)
def test_invalid_tables_are_refused(data, error):
    with pytest.raises(error):
        patch.summary(data)


def test_a_table_over_its_limit_is_not_decompressed():
    bomb = compress(bytes(limits.MAX_PATCH_HEADER_BYTES + 1))
    data = PREAMBLE.pack(b"GRP1", 0, len(bomb), bytes(32), bytes(32)) + bomb
    tracemalloc.start()
    with pytest.raises(LimitError):
        patch.summary(data)
    assert tracemalloc.get_traced_memory()[1] < limits.MAX_PATCH_HEADER_BYTES
    tracemalloc.stop()


def test_a_count_of_changes_is_checked_before_memory_is_allocated():
    frame = struct.pack("<6B", 0, 0, 100, 1, 1, 1) + varint(10**6) + varint(1) + varint(1)
    weights = {"w": torch.zeros(10, dtype=torch.bfloat16)}
    rows = varint(1) + b"w" + bytes((0, 1)) + varint(10) + bytes((1,)) + varint(10) + varint(len(frame)) + bytes(8)
    with pytest.raises(LimitError, match="1000000"):
        patch.apply(weights, table_of(rows) + frame)
