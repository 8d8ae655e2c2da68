"""Application in place, in parts and while streaming, and inversion and squashing, all give the same weights.

A refused patch leaves the weights unchanged.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol import patch
from protocol.errors import MalformedError, PatchError, ProtocolError
from tests.patch.weights import pairs, rounded_update, same_bits


def versions(count: int, shape: tuple[int, int] = (96, 160)) -> list[dict[str, torch.Tensor]]:
    """Return weights of `count` versions: a tensor that always changes, one that never does, and one of FP32."""
    random = torch.Generator().manual_seed(9)
    masters = torch.randn(shape, generator=random) * 0.0147
    single = torch.randn(50, generator=random)
    result = []
    for _ in range(count):
        masters = masters + torch.randn(shape, generator=random) * 7e-5
        single = single + torch.randn(50, generator=random) * 1e-6
        result.append({"a": masters.bfloat16(), "b": torch.ones(7, dtype=torch.bfloat16), "c": single.clone()})
    return result


def test_in_place_equals_apply():
    old, new = versions(2)
    data = patch.encode(old, new)
    weights = {name: tensor.clone() for name, tensor in old.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in weights.items()}
    patch.apply_in_place(weights, data)
    assert same_bits(weights, new)
    assert addresses == {name: tensor.data_ptr() for name, tensor in weights.items()}


def test_a_refused_patch_leaves_the_weights_untouched():
    old, new = versions(2)
    data = bytearray(patch.encode(old, new))
    data[-1] ^= 1  # this is in the last tensor's frame, so the other frames decode
    weights = {name: tensor.clone() for name, tensor in old.items()}
    with pytest.raises(ProtocolError):
        patch.apply_in_place(weights, bytes(data))
    assert same_bits(weights, old)


def test_tied_tensors_cannot_be_patched_in_place():
    old, new = rounded_update(8, 64, 1.0, seed=1)
    weights = {"a": old, "b": old}
    with pytest.raises(ValueError, match="share memory"):
        patch.apply_in_place(weights, patch.encode(weights, {"a": new, "b": new}))


@pytest.mark.parametrize("element", [0, 5000])
def test_a_wrong_base_is_refused_wherever_it_differs(element):
    old, new = versions(2)
    data = patch.encode(old, new)
    for name in old:
        wrong = {key: tensor.clone() for key, tensor in old.items()}
        flat = wrong[name].view(-1)
        flat[element % flat.numel()] += 1
        with pytest.raises(PatchError):
            patch.apply(wrong, data)


def test_a_wrong_base_is_refused_by_its_digests():
    first, second, third = versions(3)
    digests = patch.encode_with_digests(first, second).digests
    data = patch.encode(first, third)
    with pytest.raises(PatchError, match="other weights"):
        patch.apply_with_digests(second, data, digests=digests)


def test_wrong_shape_dtype_and_names_are_refused():
    old, new = versions(2)
    data = patch.encode(old, new)
    for wrong in (
        old | {"a": old["a"].reshape(-1)},
        old | {"a": old["a"].half()},
        old | {"d": old["a"]},
        {name: tensor for name, tensor in old.items() if name != "b"},
        {("x" if name == "b" else name): tensor for name, tensor in old.items()},
    ):
        with pytest.raises(PatchError):
            patch.apply(wrong, data)


@pytest.mark.parametrize("profile", ["compact", "fast"])
@pytest.mark.parametrize("count", [2, 5])
def test_squash_equals_the_patches_one_after_another(profile, count):
    chain = versions(count)
    patches = [patch.encode(a, b, profile=profile) for a, b in pairwise(chain)]
    result = patch.squash(chain[0], patches)
    assert same_bits(patch.apply(chain[0], result), chain[-1])
    assert result == patch.encode(chain[0], chain[-1], profile=profile)


def test_squash_refuses_patches_that_are_not_consecutive():
    first, second, third = versions(3)
    with pytest.raises(PatchError):
        patch.squash(first, [patch.encode(second, third)])
    with pytest.raises(PatchError):
        patch.squash(first, [patch.encode(first, second), patch.encode(first, third)])


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_the_inverse_gives_the_old_weights(profile):
    old, new = versions(2)
    data = patch.encode(old, new, profile=profile)
    inverse = patch.invert(new, data)
    assert same_bits(patch.apply(new, inverse), old)
    assert inverse == patch.encode(new, old, profile=profile)
    with pytest.raises(PatchError):
        patch.invert(old, data)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.sampled_from(("compact", "fast")))
def test_invert_of_any_bits(pair, profile):
    old, new = {"w": pair[0]}, {"w": pair[1]}
    data = patch.encode(old, new, profile=profile)
    if patch.summary(data).rows[0].mode == patch.Mode.VALUE_PLANES:
        with pytest.raises(PatchError, match="only the tensor's new values"):
            patch.invert(new, data)
    else:
        assert same_bits(patch.apply(new, patch.invert(new, data)), old)


def test_every_mode_but_value_planes_can_be_inverted():
    old, new = rounded_update(64, 96, 1.0, seed=3)
    noise = torch.randint(-(2**15), 2**15, old.shape, dtype=torch.int16, generator=torch.Generator().manual_seed(4))
    updates = {
        patch.Mode.SPARSE: (old, new),
        patch.Mode.STEP_PLANES: (torch.zeros_like(old), (old.float() * 1e-3).bfloat16()),
        patch.Mode.XOR_PLANES: (old, -old),
        patch.Mode.RAW_STEP_PLANES: (old, noise.view(torch.bfloat16)),
        patch.Mode.SMALL_CHANGES: (old, torch.where(torch.arange(96) < 95, old, new)),
    }
    for mode, (before, after) in updates.items():
        data = patch.encode({"w": before}, {"w": after})
        assert patch.summary(data).rows[0].mode == mode
        assert same_bits(patch.apply({"w": after}, patch.invert({"w": after}, data)), {"w": before})


def test_value_planes_cannot_be_inverted_and_the_error_names_the_tensor():
    old, new = rounded_update(64, 96, 1.0, seed=3)
    data = patch.encode({"a": old, "b": old}, {"a": new, "b": torch.zeros_like(old)})
    with pytest.raises(PatchError, match=r"b: the patch has only the tensor's new values; .* older anchor"):
        patch.invert(patch.apply({"a": old, "b": old}, data), data)


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_streaming_completes_tensors_as_they_arrive(piece):
    old, new = versions(2)
    data = patch.encode(old, new)
    stream = patch.StreamingApply(old)
    names = [name for start in range(0, len(data), piece) for name in stream.feed(data[start : start + piece])]
    assert names == sorted(old)
    assert same_bits(stream.finish().weights, new)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_parts_end_behind_frames_and_joined_they_are_the_patch(part_bytes, threads):
    old, new = versions(2)
    data = patch.encode(old, new)
    parts = patch.split_parts(data, part_bytes)
    assert b"".join(parts) == data
    assert all(len(part) >= part_bytes for part in parts[:-1])
    stream = patch.StreamingApply(old, threads=threads)
    names = [stream.feed(part) for part in parts]
    assert [name for part in names for name in part] == sorted(old)
    assert all(names[1:]), "a part completes no tensor"
    result = stream.finish()
    assert same_bits(result.weights, new)
    assert list(result.weights) == list(old)


def test_no_patch_has_more_parts_than_a_manifest_may_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.limits.MAX_PATCH_PARTS", 2)
    data = patch.encode(*versions(2))
    assert 1 <= len(patch.split_parts(data, 1)) <= 2


def test_a_frame_that_was_refused_cannot_be_passed_over():
    old, new = versions(2)
    data = patch.encode(old, new)
    stream = patch.StreamingApply(old)
    with pytest.raises(ProtocolError):
        stream.feed(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PatchError, match="cut off"):
        stream.finish()


def test_streaming_refuses_too_few_and_too_many_bytes():
    old, new = versions(2)
    data = patch.encode(old, new)
    with pytest.raises(PatchError, match="cut off"):
        patch.StreamingApply(old).finish()
    stream = patch.StreamingApply(old)
    stream.feed(data[:-1])
    with pytest.raises(PatchError, match="cut off"):
        stream.finish()
    with pytest.raises(PatchError, match="behind the end"):
        patch.StreamingApply(old).feed(data + b"\0")


@pytest.mark.parametrize("share", [1.0, 1e6])
@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_apply_rows_equals_the_rows_of_the_whole_tensor(share, profile):
    old, new = rounded_update(2048, 2048, share, seed=8)
    data = patch.encode({"w": old}, {"w": new}, profile=profile)
    edges = patch.row_edges((2048, 2048))
    assert set(range(0, 2049, 256)) <= set(edges)
    for first, last in ((0, 256), (256, 1024), (1792, 2048), (0, 2048)):
        rows = patch.apply_rows(old[first:last].clone(), data, "w", first, 2048)
        assert same_bits({"w": rows}, {"w": new[first:last]})
    with pytest.raises(ValueError, match="must begin and end at one of"):
        patch.apply_rows(old[1:257], data, "w", 1, 2048)
    with pytest.raises(PatchError):
        patch.apply_rows(old[0:256], data, "x", 0, 2048)


def test_truncation_is_malformed_at_every_length():
    old, new = versions(2, (8, 40))
    data = patch.encode(old, new)
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            patch.apply(old, data[:length])


def test_apply_tensors_changes_only_these_tensors():
    old, new = rounded_update(64, 96, 1.0, seed=11)
    before, after = {"a": old, "b": old, "c": old}, {"a": new, "b": old, "c": -old}
    data = patch.encode(before, after)
    assert same_bits(patch.apply_tensors({"c": old, "b": old}, data), {"c": -old, "b": old})
    with pytest.raises(PatchError, match=r"d: a tensor that the patch does not have"):
        patch.apply_tensors({"a": old, "d": old}, data)
    with pytest.raises(PatchError, match=r"a: .* where the weights have"):
        patch.apply_tensors({"a": old[:8]}, data)
    with pytest.raises(PatchError, match=r"c: .* a wrong base"):
        patch.apply_tensors({"c": new}, data)
