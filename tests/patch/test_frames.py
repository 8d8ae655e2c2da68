"""Each tensor takes its cheapest way, and no patch is larger than it must be."""

import numpy as np
import pytest
import torch
import zstandard

from protocol import patch
from protocol.patch import Mode
from protocol.patch.small_changes import MAX_SMALL_CHANGES, encode_small_changes
from protocol.patch.sparse import Scratch, encode_sparse
from protocol.patch.values import bits_of, layout_of
from tests.patch.weights import rounded_update, same_bits

PREAMBLE_AND_TABLE = 160
LAYOUT = layout_of(torch.bfloat16)


def encoded(old: torch.Tensor, new: torch.Tensor, profile: str = "compact") -> tuple[Mode, int]:
    data = patch.encode({"w": old}, {"w": new}, profile=profile)
    assert same_bits(patch.apply({"w": old}, data), {"w": new})
    return patch.summary(data).rows[0].mode, len(data)


def test_a_small_update_is_sparse():
    old, new = rounded_update(256, 512, 1.0, seed=1)
    assert encoded(old, new)[0] == Mode.SPARSE


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_a_tensor_that_was_reset_to_zeros_costs_almost_nothing(profile):
    old, _ = rounded_update(256, 512, 1.0, seed=2)
    assert encoded(old, torch.zeros_like(old), profile)[1] < 400


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_noise_is_never_larger_than_the_tensor(profile):
    random = torch.Generator().manual_seed(3)
    old, new = (torch.randint(-(2**15), 2**15, (300, 300), dtype=torch.int16, generator=random) for _ in range(2))
    old, new = old.view(torch.bfloat16), new.view(torch.bfloat16)
    assert encoded(old, new, profile)[1] <= old.nbytes + PREAMBLE_AND_TABLE


def test_rows_of_an_embedding_cost_no_more_than_their_steps():
    old, _ = rounded_update(2048, 128, 1.0, seed=4)
    new = old.clone()
    new[::97] = (new[::97].float() * 1.01).bfloat16()
    assert encoded(old, new)[1] < 2 * new[::97].numel() + 600


@pytest.mark.parametrize("spacing", [23, 37, 64, 97])
def test_rows_that_a_probe_may_meet_or_miss_are_sent_as_planes(spacing):
    """Step planes of few changed rows are a third of a sparse frame, wherever the rows stand."""
    old, _ = rounded_update(1024, 1024, 1.0, seed=7)
    new = old.clone()
    new[::spacing] = (new[::spacing].float() * 1.01).bfloat16()
    assert encoded(old, new)[0] == Mode.STEP_PLANES


def frame_of(old: torch.Tensor, new: torch.Tensor) -> tuple[Mode, int]:
    row = patch.summary(patch.encode({"w": old}, {"w": new})).rows[0]
    return row.mode, row.size


def test_one_change_costs_no_more_than_its_place_and_its_step():
    old, _ = rounded_update(1024, 1024, 1.0, seed=8)
    bits = old.clone().view(torch.int16)
    bits[777, 77] += 1
    assert frame_of(old, bits.view(torch.bfloat16)) == (Mode.SMALL_CHANGES, 4)


@pytest.mark.parametrize("changes", [1, 2, 12, 31, 32, 33, 40])
def test_no_way_is_shorter_than_the_one_taken(changes):
    old, _ = rounded_update(64, 64, 1.0, seed=9)
    bits = old.clone().view(torch.int16)
    bits.view(-1)[:: 4096 // changes][:changes] += 1
    new = bits.view(torch.bfloat16)
    few = encode_small_changes(bits_of(old), bits_of(new), np.flatnonzero(bits_of(old) != bits_of(new)), LAYOUT, 8192)
    _, sparse = encode_sparse(bits_of(old), bits_of(new), (64, 64), LAYOUT, Scratch(), 8192, classes=True)
    assert frame_of(old, new)[1] == (min(len(few), len(sparse)) if changes <= MAX_SMALL_CHANGES else len(sparse))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_a_tensor_of_one_element_costs_no_more_than_the_element(dtype):
    old, new = torch.zeros(1, dtype=dtype), -torch.ones(1, dtype=dtype)
    assert frame_of(old, new)[1] <= old.nbytes


def test_a_tensor_of_one_value_costs_no_more_than_zstd_takes():
    old, _ = rounded_update(1024, 1024, 1.0, seed=10)
    new = torch.zeros_like(old)
    assert frame_of(old, new)[1] <= len(
        zstandard.ZstdCompressor(level=1).compress(new.view(torch.int16).numpy().tobytes())
    )


def test_experts_without_a_change_cost_a_few_bytes():
    old, new = rounded_update(64, 64, 1.0, seed=5)
    few = {f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": old for i in range(4) for j in range(4)}
    many = {f"model.layers.{i}.mlp.experts.{j}.up_proj.weight": old for i in range(16) for j in range(64)}
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    extra = len(patch.encode(many, many | {name: new})) - len(patch.encode(few, few | {name: new}))
    assert extra / (len(many) - len(few)) < 8


def test_compact_is_smaller_than_fast_and_both_say_the_same():
    old, new = rounded_update(512, 1024, 1.0, seed=6)
    compact, fast = (patch.encode({"w": old}, {"w": new}, profile=profile) for profile in ("compact", "fast"))
    assert len(compact) < 0.85 * len(fast)
    assert same_bits(patch.apply({"w": old}, compact), patch.apply({"w": old}, fast))
    assert patch.summary(compact).result == patch.summary(fast).result


def test_auto_weighs_bytes_against_time():
    rates = {"compact": patch.Rates(2e9, 2e9, 0.0045), "fast": patch.Rates(4e9, 4e9, 0.0062)}
    slow_link, fast_link, slowest = (
        patch.choose_profile(14_000_000_000, patch.LinkConditions(link / 8, rates)) for link in (400e6, 100e9, 10e6)
    )
    assert (slow_link.profile, fast_link.profile, slowest.profile) == ("fast", "fast", "compact")
    assert "400 Mbit/s" in slow_link.reason
