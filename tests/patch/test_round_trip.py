"""A patch gives the trainer's weights bit for bit, whatever their values are."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import errors, patch
from protocol.digest import digest_weights, dtypes, tensor_digest
from protocol.patch.codec import small_pairs, units
from protocol.patch.container import read_header, split_frames
from tests.patch.weights import DTYPES, from_bits, pairs, round_trip, rounded_update, same_bits

ALL_ORDERS = settings(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))


@ALL_ORDERS
@given(pairs(), st.sampled_from(("compact", "fast")))
def test_apply_gives_every_bit(pair, profile):
    old, new = pair
    round_trip(old, new, profile)


@ALL_ORDERS
@given(st.lists(pairs(), max_size=4))
def test_weights_of_several_tensors(tensors):
    old = {f"layer.{i}": pair[0] for i, pair in enumerate(tensors)}
    new = {f"layer.{i}": pair[1] for i, pair in enumerate(tensors)}
    data = patch.encode(old, new)
    summary = patch.summary(data)
    changed_tensors = sum(int((a.view(-1).view(torch.uint8) != b.view(-1).view(torch.uint8)).any()) for a, b in tensors)
    rows = [row for unit in summary.table.units(old) for row in unit]
    assert sum(row.mode != patch.Mode.UNCHANGED for row in rows) == changed_tensors
    assert sorted((row.name, row.elements) for row in rows) == sorted((k, t.numel()) for k, t in old.items())
    assert (summary.base, summary.result) == (digest_weights(old), digest_weights(new))
    assert same_bits(patch.apply(old, data), new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patches_between_all_bit_patterns(dtype):
    """With 8 bits, all pairs of patterns are tested; with 16 and 32 bits, all 16-bit patterns in random pairs."""
    random = np.random.default_rng(1)
    if dtype.itemsize == 1:
        old, new = (grid.reshape(-1) for grid in np.meshgrid(np.arange(256), np.arange(256)))
    else:
        scale = 1 if dtype.itemsize == 2 else 65537
        old, new = np.arange(65536) * scale, random.permutation(65536) * scale
    before, after = from_bits(old, dtype, (256, 256)), from_bits(new, dtype, (256, 256))
    for profile in ("compact", "fast"):
        round_trip(before, after, profile)


@pytest.mark.parametrize("share", [1e-3, 0.1, 1.0, 10.0, 300.0, 1e5])
@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_sparse_modes_at_every_density(share, profile):
    old, new = rounded_update(300, 701, share, seed=3)
    data = round_trip(old, new, profile)
    assert patch.summary(data).changed == int((old.view(torch.int16) != new.view(torch.int16)).sum())


def test_more_than_one_chunk_and_a_row_longer_than_one():
    for shape in ((3, 1 << 19), (1, (1 << 20) + 17), (8, 1 << 19)):
        round_trip(*rounded_update(*shape, 1.0, seed=4))


def test_unchanged_tensors_are_shared_and_nothing_is_mutated():
    old, new = rounded_update(64, 64, 1.0, seed=5)
    weights = {"a": old, "b": old.clone()}
    copy = {name: tensor.clone() for name, tensor in weights.items()}
    result = patch.apply(weights, patch.encode(weights, {"a": new, "b": old}))
    assert result["b"] is weights["b"]
    assert result["a"].data_ptr() != weights["a"].data_ptr()
    assert same_bits(weights, copy)


def test_digests_are_used_and_returned():
    old, new = rounded_update(64, 64, 1.0, seed=6)
    digests = {"a": tensor_digest(old), "b": tensor_digest(old)}
    encoded = patch.encode({"a": old, "b": old}, {"a": new, "b": old}, base_digests=digests)
    result = patch.apply_with_digests({"a": old, "b": old}, encoded, digests=digests, threads=2)
    assert result.digests == {"a": tensor_digest(new), "b": tensor_digest(old)}
    assert encoded == patch.encode({"a": old, "b": old}, {"a": new, "b": old})


def test_the_number_of_threads_does_not_change_the_patch():
    pairs_ = [rounded_update(100, 100, 1.0, seed=seed) for seed in range(6)]
    old = {str(i): pair[0] for i, pair in enumerate(pairs_)}
    new = {str(i): pair[1] for i, pair in enumerate(pairs_)}
    assert patch.encode(old, new, threads=3) == patch.encode(old, new)


def test_weights_with_different_tensors_are_a_value_error():
    with pytest.raises(ValueError, match="same tensors"):
        patch.encode({"a": torch.zeros(2)}, {"b": torch.zeros(2)})
    with pytest.raises(ValueError, match="dtypes and shapes"):
        patch.encode({"a": torch.zeros(2)}, {"a": torch.zeros(3)})


def test_memory_that_is_not_aligned():
    old, new = rounded_update(33, 65, 1.0, seed=7)
    unaligned = torch.frombuffer(bytearray(b"\0" + old.view(torch.uint8).numpy().tobytes()), dtype=torch.uint8)[1:]
    round_trip(unaligned.view(torch.bfloat16).reshape(old.shape) if unaligned.data_ptr() % 2 == 0 else old, new)
    round_trip(old.reshape(-1)[3:].clone()[1:], new.reshape(-1)[3:].clone()[1:])


def test_small_tensors_share_frames_up_to_the_limit():
    old = {f"w{i:02}": torch.zeros((1 << 20) - 1, dtype=torch.uint8) for i in range(17)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor[::1000] = 1
    assert [len(names) for names in units(new, small_pairs(old, new))] == [8, 8, 1]
    assert same_bits(patch.apply(old, patch.encode(old, new)), new)


# Golden vectors stay readable, and hostile vectors are refused with the same class of error


FOLDER = Path(__file__).parent.parent / "vectors" / "patch"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
HOSTILE = json.loads((FOLDER / "hostile.json").read_text())


def weights(plain: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray.fromhex(data), dtype=dtypes[dtype]).reshape(shape)
        for name, (dtype, shape, data) in plain.items()
    }


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden(case):
    old, new, data = weights(case["old"]), weights(case["new"]), bytes.fromhex(case["patch"])
    assert same_bits(patch.apply(old, data), new)
    again = patch.encode(old, new, profile=case["profile"])
    assert coded_frames(old, again) == coded_frames(old, data)  # the output of zstd may differ between releases


def coded_frames(old: dict[str, torch.Tensor], data: bytes) -> dict[str, bytes]:
    header, coded = read_header(data), (patch.Mode.SPARSE, patch.Mode.STEPS)
    frames = split_frames(data, header, header.table.units(old))
    return {unit[-1].name: bytes(frame) for unit, frame in frames if unit[-1].mode in coded}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case["name"])
def test_hostile(case):
    with pytest.raises(getattr(errors, case["error"])):
        patch.apply(weights(GOLDEN[0]["old"]), bytes.fromhex(case["patch"]))
