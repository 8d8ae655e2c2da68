"""Hostile bytes give a value or a ProtocolError, and leave the weights unchanged; they take little memory before they
are refused. Memory is measured by the operating system's kernel, in a forked child process.
"""

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zstandard

from grailnode.convert.inspect_patch import inspect_patch
from protocol import limits, patch
from protocol.chain import safetensors
from protocol.compression import compress
from protocol.digest import digest_weights, tensor_digest
from protocol.errors import LimitError, MalformedError, PatchError, ProtocolError
from protocol.patch.container import PREAMBLE
from protocol.patch.fields import varint
from tests.patch.containers import container, entry
from tests.patch.weights import rounded_update, same_bits
from tests.support.faults.patch_mutations import MUTATORS, corpus, mutations, parsers
from tests.support.measuring.memory import peak_extra

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
        (PREAMBLE.pack(b"GRP4", 0, 2**32 - 1, bytes(32), bytes(32)), LimitError),
        (PREAMBLE.pack(b"GRP4", 9, 0, bytes(32), bytes(32)), MalformedError),
        (PREAMBLE.pack(b"GRP3", 0, 0, bytes(32), bytes(32)), MalformedError),
        (container([9, 1], entry()), PatchError),
        (container([1, 8], entry()), PatchError),
        (container([8, 0]), PatchError),
        (container([8 + limits.MAX_TENSORS + 1, 1], entry()), LimitError),
        (container([1], varint(limits.MAX_ELEMENTS + 1) + varint(0) + bytes(8)), LimitError),
        (container([], count=1 << 30), LimitError),
        (container([0], count=2), MalformedError),
        (container([1]), MalformedError),
        (container([0]) + b"x", MalformedError),
        (container([0], b"x"), MalformedError),
    ],
)
def test_invalid_tables_are_refused(data, error):
    with pytest.raises(error):
        patch.summary(data)


def bf16(elements: int) -> torch.Tensor:
    return torch.zeros(elements, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("weights", "data", "error"),
    [
        ({"w": bf16(10)}, container([1], entry(changes=11)), PatchError),
        ({"w": bf16(10)}, container([1], entry(changes=0)), PatchError),
        ({"w": bf16(10)}, container([1], entry(size=85), bytes(85)), PatchError),
        ({"w": bf16(10)}, container([0, 0]), PatchError),
        ({"w": bf16(10), "x": bf16(10)}, container([0]), PatchError),
        ({"v": bf16(10), "w": bf16(10)}, container([8, 1], entry(changes=21)), PatchError),
        ({"v": bf16(10).half(), "w": bf16(10)}, container([8, 1], entry()), PatchError),
        ({"v": bf16(1 << 23), "w": bf16(10)}, container([8, 1], entry()), LimitError),
    ],
)
def test_tables_that_do_not_fit_the_weights_are_refused(weights, data, error):
    with pytest.raises(error):
        patch.apply(weights, data)


def test_a_patch_of_the_version_before_is_refused_in_one_line():
    with pytest.raises(MalformedError, match="patch: of another version of the format, b'GRP3'"):
        patch.summary(container([0]).replace(b"GRP4", b"GRP3"))


def test_a_table_over_its_limit_is_not_decompressed():
    bomb = compress(bytes(limits.MAX_PATCH_HEADER_BYTES + 1))
    data = PREAMBLE.pack(b"GRP4", 0, len(bomb), bytes(32), bytes(32)) + bomb
    tracemalloc.start()
    with pytest.raises(LimitError):
        patch.summary(data)
    assert tracemalloc.get_traced_memory()[1] < limits.MAX_PATCH_HEADER_BYTES
    tracemalloc.stop()


def test_a_count_of_changes_is_checked_before_memory_is_allocated():
    frame = struct.pack("<6B", 0, 0, 100, 1, 1, 1) + varint(10**6) + varint(1) + varint(1)
    weights = {"w": torch.zeros(10, dtype=torch.bfloat16)}
    with pytest.raises(LimitError, match="1000000"):
        patch.apply(weights, container([1], entry(10, len(frame)), frame))


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


# The memory of hostile and of honest work


MOST = 64 * limits.MIB

WEIGHTS = {"w": torch.zeros(4096, dtype=torch.bfloat16)}
SPARSE, STEPS, VALUES, XOR, RAW, ROWS = 1, 2, 3, 4, 5, 7


def one(mode: int, frame: bytes, changes: int = 4096, size: int | None = None) -> bytes:
    """Return a patch of the one tensor of WEIGHTS."""
    return container([mode], entry(changes, len(frame) if size is None else size), frame)


def false_frame(size: int) -> bytes:
    """Return a zstd frame that declares `size` bytes and does not contain them."""
    return zstandard.FRAME_HEADER + bytes((0b11100000,)) + size.to_bytes(8, "little") + bytes.fromhex("030000")


def wide_window() -> bytes:
    """Return a zstd frame of the right size that requires the largest window allowed."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1, write_content_size=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(8192))


def fits(work: Callable[[], object], most: int) -> bool:
    """Return whether one of three runs stays below `most` bytes, because other activity can only add to a peak."""
    peaks: list[int] = []
    while len(peaks) < 3:
        peaks.append(peak_extra(work))
        if peaks[-1] < most:
            return True
    print(f"peaks {peaks}, limit {most}")
    return False


NO_CLASSES = bytes((0, 0, 100, 1, 1, 1))  # a model without classes
ONE_CLASS = bytes((1, 100, 1, 128, 1, 1))  # a model of a dense frame
HOSTILE: dict[str, Callable[[], bytes]] = {
    "as many tensors as a table may have": lambda: container(
        [SPARSE] * limits.MAX_TENSORS, entry() * limits.MAX_TENSORS
    ),
    "as many tensors as a table may have, joined": lambda: container(
        [8] * (limits.MAX_TENSORS - 1) + [SPARSE], entry()
    ),
    "more tensors than a table may have": lambda: container([], count=1 << 40),
    "a table that unpacks to more than it may": lambda: container([], bytes(limits.MAX_PATCH_HEADER_BYTES), count=0),
    "a table that unpacks to all that it may": lambda: container([], bytes(limits.MAX_PATCH_HEADER_BYTES - 1), count=0),
    "a table that declares 2^62 bytes": lambda: (
        PREAMBLE.pack(b"GRP4", 0, 16, bytes(32), bytes(32)) + false_frame(1 << 62)
    ),
    "a frame of 2^36 bytes": lambda: one(RAW, b"", size=1 << 36),
    "more changes than elements": lambda: one(SPARSE, b"", changes=4097),
    "planes of 2^62 bytes": lambda: one(XOR, false_frame(1 << 62)),
    "planes that unpack to 1 GiB": lambda: one(VALUES, zstandard.ZstdCompressor(1).compress(bytes(1 << 30))[:8192]),
    "planes of the right size with more behind it": lambda: one(
        XOR, false_frame(8192) + compress(bytes(1 << 24))[:8000]
    ),
    "planes with a window of 128 MiB": lambda: one(VALUES, wide_window()),
    "raw elements with too few bytes": lambda: one(RAW, bytes(8191)),
    "4096 changes listed, sections of 4 GiB": lambda: one(SPARSE, NO_CLASSES + varint(4096) + 2 * varint(1 << 32)),
    "16 classes and no more": lambda: one(SPARSE, bytes((16, 100)) + bytes(64)),
    "counts that do not add up": lambda: one(SPARSE, NO_CLASSES + varint(1) + 2 * varint(0)),
    "every element changed, no code": lambda: one(SPARSE, NO_CLASSES + varint(4096) + 2 * varint(0)),
    "steps, sections of 4 GiB": lambda: one(STEPS, ONE_CLASS + 2 * varint(1 << 32)),
    "steps without the states": lambda: one(STEPS, ONE_CLASS + 2 * varint(0)),
    "steps of states that no encoder writes": lambda: one(STEPS, ONE_CLASS + varint(16) + varint(0) + bytes(32)),
    "steps in 17 classes": lambda: one(STEPS, bytes((17, 100)) + bytes(64)),
    "steps of 255 symbols": lambda: one(STEPS, bytes((1, 100, 1, 128, 255)) + bytes(255)),
    "rows that do not fit": lambda: one(ROWS, varint(4096) + varint(1 << 32) + bytes(64)),
    "no rows": lambda: one(ROWS, varint(0) + varint(1) + bytes(2)),
}

PARSERS = parsers(WEIGHTS) | {"inspection": inspect_patch}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_hostile_bytes_take_little_memory(case):
    data = HOSTILE[case]()

    def every_parser():
        for parser in PARSERS.values():
            with suppress(ProtocolError):
                parser(data)

    with pytest.raises(ProtocolError):
        patch.apply(WEIGHTS, data)
    assert fits(every_parser, MOST)
    assert not WEIGHTS["w"].any()


def test_the_measurement_sees_an_allocation():
    """The measurement itself must see an allocation."""
    assert 99 * limits.MIB < peak_extra(lambda: torch.ones(100 * limits.MIB, dtype=torch.uint8)) < 110 * limits.MIB
    assert peak_extra(lambda: None) < limits.MIB


NOISE = torch.randint(-(2**15), 2**15, (4096, 1024), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
OLD, NEW = rounded_update(4096, 1024, 1.0, seed=1)
UPDATES = {
    "sparse": (OLD, NEW),
    "dense": (OLD, (OLD.float() * 1.01).bfloat16()),
    "from zeros": (torch.zeros_like(OLD), (OLD.float() * 1e-3).bfloat16()),
    "value planes": (OLD, torch.zeros_like(OLD)),
    "XOR planes": (OLD, -OLD),
    "raw elements": (OLD, NOISE.view(torch.bfloat16)),
}
SCRATCH = 28 * limits.MIB  # of an encoder, whatever the tensor's size
BLOCKS = 6 * limits.MIB  # of a decoder, including memory that its allocator does not return


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(UPDATES))
def test_encoding_and_applying_take_the_memory_of_two_tensors_and_scratch(case):
    before, after = ({"w": tensor} for tensor in UPDATES[case])
    digests = {name: tensor_digest(tensor) for name, tensor in before.items()}
    data = patch.encode(before, after)
    nbytes = OLD.nbytes

    def apply_stream():
        stream = patch.StreamingApply(before, digests=digests)
        for start in range(0, len(data), 1 << 16):
            stream.feed(data[start : start + (1 << 16)])
        stream.finish()

    encoding = 2 * nbytes + SCRATCH + len(data)
    assert fits(lambda: patch.encode(before, after, base_digests=digests), encoding)
    assert fits(lambda: patch.apply_with_digests(before, data, digests=digests), (1 + 2) * nbytes + BLOCKS)
    assert fits(apply_stream, (1 + 2) * nbytes + BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["from zeros", "raw elements"])
def test_encoding_a_large_tensor_takes_the_memory_of_two(case):
    """Every element changes, so this covers all modes that are tried, the changes, and the scratch memory."""
    before, after = ({"w": tensor.repeat(8, 1)} for tensor in UPDATES[case])
    digests = {name: tensor_digest(tensor) for name, tensor in before.items()}
    data = patch.encode(before, after)
    most = 2 * before["w"].nbytes + len(data)
    assert fits(lambda: patch.encode(before, after, base_digests=digests), most)


def test_a_whole_patch_is_applied_without_a_copy_of_its_frames() -> None:
    old = {"w": torch.zeros(1 << 21, dtype=torch.bfloat16)}
    bits = torch.randint(-(1 << 15), 1 << 15, (1 << 21,), generator=torch.Generator().manual_seed(1))
    data = patch.encode(old, {"w": bits.to(torch.int16).view(torch.bfloat16)})
    assert len(data) > 4 * limits.MIB
    patch.apply(old, data)
    tracemalloc.start()
    patch.apply(old, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 7 * limits.MIB  # the new tensor takes 4
