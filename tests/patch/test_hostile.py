"""Hostile bytes give a value or a ProtocolError in bounded memory, and leave the weights unchanged."""

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from protocol import limits, patch
from protocol.chain import safetensors
from protocol.compression import compress
from protocol.digest import digest_weights
from protocol.errors import LimitError, MalformedError, PatchError, ProtocolError
from protocol.patch.container import PREAMBLE
from protocol.patch.fields import varint
from tests.patch.containers import container, joined, row
from tests.patch.weights import same_bits
from tests.support.faults.patch_mutations import MUTATORS, mutations
from tests.support.faults.patch_parsers import corpus, parsers

MUTATIONS_PER_CASE = 1500


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
            for parse in parsers(weights).values():
                with suppress(ProtocolError):
                    parse(mutant)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", MalformedError),
        (PREAMBLE.pack(b"GRP2", 0, 2**32 - 1, bytes(32), bytes(32)), LimitError),
        (PREAMBLE.pack(b"GRP2", 9, 0, bytes(32), bytes(32)), MalformedError),
        (container(row(b"w", 10, changes=11)), PatchError),
        (container(row(b"w", 10, changes=0)), PatchError),
        (container(row(b"w", 10, size=10**9)), PatchError),
        (container(row(b"x", 10, mode=0) + row(b"w", 10, mode=0), 2), MalformedError),
        (container(row(b"\xff", 10, mode=0)), MalformedError),
        (container(row(b"w" * 513, 10, mode=0)), LimitError),
        (container(row(b"w", 10, mode=9)), MalformedError),
        (container(joined(b"v", 10, 0) + row(b"w", 10), 2), MalformedError),
        (container(joined(b"v", 10, 2) + row(b"w", 10), 2), PatchError),
        (container(joined(b"v", 0, 1) + row(b"w", 10, mode=0), 2), PatchError),
        (container(joined(b"u", 9, 1) + joined(b"v", 9, 1) + row(b"w", 10), 3), PatchError),
        (container(joined(b"v", 10, 1) + row(b"w", 10, changes=21), 2), PatchError),
        (container(joined(b"v", 1 << 23, 1) + row(b"w", 10), 2), LimitError),
        (container(b"", 1 << 30), LimitError),
        (container(row(b"w", 10, mode=0)) + b"x", MalformedError),
        (container(row(b"w", 10, mode=0) + b"x"), MalformedError),
    ],
)
def test_invalid_tables_are_refused(data, error):
    with pytest.raises(error):
        patch.summary(data)


def test_a_table_over_its_limit_is_not_decompressed():
    bomb = compress(bytes(limits.MAX_PATCH_HEADER_BYTES + 1))
    data = PREAMBLE.pack(b"GRP2", 0, len(bomb), bytes(32), bytes(32)) + bomb
    tracemalloc.start()
    with pytest.raises(LimitError):
        patch.summary(data)
    assert tracemalloc.get_traced_memory()[1] < limits.MAX_PATCH_HEADER_BYTES
    tracemalloc.stop()


def test_a_count_of_changes_is_checked_before_memory_is_allocated():
    frame = struct.pack("<6B", 0, 0, 100, 1, 1, 1) + varint(10**6) + varint(1) + varint(1)
    weights = {"w": torch.zeros(10, dtype=torch.bfloat16)}
    with pytest.raises(LimitError, match="1000000"):
        patch.apply(weights, container(row(b"w", 10, changes=10, size=len(frame)), 1, frame))


# The corpus has a malformed patch for each way in which a parser refused one (`python -m bench.fuzz --keep`)


FOLDER = Path(__file__).parent / "corpus"
CASES = sorted(path.parent for path in FOLDER.glob("*/weights.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parser_answers_with_a_value_or_a_protocol_error(case):
    weights = safetensors.read((case / "weights.safetensors").read_bytes())
    before, files = digest_weights(weights), sorted(case.glob("*.patch"))
    assert len(files) >= 5
    for file in files:
        data = file.read_bytes()
        with pytest.raises(ProtocolError):
            patch.apply(weights, data)
        for parse in parsers(weights).values():
            with suppress(ProtocolError):
                parse(data)
    assert digest_weights(weights) == before
