"""Each tensor is encoded in its smallest mode, in either profile."""

import numpy as np
import pytest
import torch
import zstandard

from protocol import patch
from protocol.patch import Mode
from protocol.patch.plain_frames import MAX_SMALL_CHANGES, encode_small_changes
from protocol.patch.sparse import Scratch, encode_sparse
from protocol.patch.values import bits_of, layout_of
from tests.patch.weights import round_trip, rounded_update

PREAMBLE_AND_TABLE = 110
LAYOUT = layout_of(torch.bfloat16)


def encode_tensor(old: torch.Tensor, new: torch.Tensor, profile: str = "compact") -> tuple[Mode, int]:
    """Encode a tensor, check the round trip, and return the mode and the bytes of the patch."""
    data = round_trip(old, new, profile)
    return patch.summary(data).table.units({"w": old})[0][0].mode, len(data)


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_noise_is_never_larger_than_the_tensor(profile):
    random = torch.Generator().manual_seed(3)
    old, new = (torch.randint(-(2**15), 2**15, (300, 300), dtype=torch.int16, generator=random) for _ in range(2))
    old, new = old.view(torch.bfloat16), new.view(torch.bfloat16)
    assert encode_tensor(old, new, profile)[1] <= old.nbytes + PREAMBLE_AND_TABLE


def test_rows_of_an_embedding_cost_no_more_than_their_steps():
    old, _ = rounded_update(2048, 128, 1.0, seed=4)
    new = old.clone()
    new[::97] = (new[::97].float() * 1.01).bfloat16()
    assert encode_tensor(old, new)[1] < 2 * new[::97].numel() + 600


@pytest.mark.parametrize("spacing", [23, 37, 64, 97])
def test_a_few_changed_rows_are_sent_alone(spacing):
    """A frame of the changed rows takes little more than that of a tensor of these rows alone."""
    old, _ = rounded_update(1024, 1024, 1.0, seed=7)
    new = old.clone()
    new[::spacing] = (new[::spacing].float() * 1.01).bfloat16()
    mode, size = encode_tensor(old, new)
    assert mode == Mode.ROWS
    assert size < encode_tensor(old[::spacing].contiguous(), new[::spacing].contiguous())[1] + 160


def frame_of(old: torch.Tensor, new: torch.Tensor) -> tuple[Mode, int]:
    ((row,),) = patch.summary(round_trip(old, new)).table.units({"w": old})
    return row.mode, row.size


def test_one_change_takes_only_the_bytes_of_its_gap_and_its_step():
    old, _ = rounded_update(1024, 1024, 1.0, seed=8)
    bits = old.clone().view(torch.int16)
    bits[777, 77] += 1
    assert frame_of(old, bits.view(torch.bfloat16)) == (Mode.SMALL_CHANGES, 4)


@pytest.mark.parametrize("changes", [1, 2, 12, 31, 32, 33, 40])
def test_the_smallest_frame_is_chosen(changes):
    old, _ = rounded_update(64, 64, 1.0, seed=9)
    bits = old.clone().view(torch.int16)
    bits.view(-1)[:: 4096 // changes][:changes] += 1
    new = bits.view(torch.bfloat16)
    places = np.flatnonzero(bits_of(old) != bits_of(new))
    small = encode_small_changes(bits_of(old), bits_of(new), places, LAYOUT, 8192)
    _, sparse = encode_sparse(bits_of(old), bits_of(new), LAYOUT, Scratch(), 8192, classes=True)
    assert frame_of(old, new)[1] == (min(len(small), len(sparse)) if changes <= MAX_SMALL_CHANGES else len(sparse))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_a_tensor_of_one_element_costs_no_more_than_the_element(dtype):
    old, new = torch.zeros(1, dtype=dtype), -torch.ones(1, dtype=dtype)
    assert frame_of(old, new)[1] <= old.nbytes


def test_a_tensor_of_one_value_costs_no_more_than_with_zstd():
    old, _ = rounded_update(1024, 1024, 1.0, seed=10)
    new = torch.zeros_like(old)
    assert frame_of(old, new)[1] <= len(
        zstandard.ZstdCompressor(level=1).compress(new.view(torch.int16).numpy().tobytes())
    )


def test_experts_without_a_change_cost_a_few_bytes():
    old, new = rounded_update(64, 64, 1.0, seed=5)
    fewer = {f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": old for i in range(4) for j in range(4)}
    many = {f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": old for i in range(16) for j in range(64)}
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    extra = len(patch.encode(many, many | {name: new})) - len(patch.encode(fewer, fewer | {name: new}))
    assert extra / (len(many) - len(fewer)) < 8


def test_compact_is_smaller_than_fast_and_both_give_the_same_weights():
    old, new = rounded_update(512, 1024, 1.0, seed=6)
    compact, fast = (round_trip(old, new, profile) for profile in ("compact", "fast"))
    assert len(compact) < 0.85 * len(fast)
    assert patch.summary(compact).result == patch.summary(fast).result


def test_an_unknown_profile_is_refused():
    old, new = rounded_update(8, 8, 1.0, seed=6)
    with pytest.raises(ValueError, match="no profile 'best': compact or fast"):
        patch.encode({"w": old}, {"w": new}, profile="best")
