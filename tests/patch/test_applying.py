"""Application at once, in parts and while streaming gives the same weights, and refuses what does not fit them."""

import pytest
import torch

from protocol import patch
from protocol.digest import tensor_digest
from protocol.errors import MalformedError, PatchError, ProtocolError
from tests.patch.weights import same_bits


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


OLD, NEW = versions(2)
DATA = patch.encode(OLD, NEW)


@pytest.mark.parametrize("element", [0, 5000])
def test_a_wrong_base_is_refused_wherever_it_differs(element):
    for name in OLD:
        wrong = {key: tensor.clone() for key, tensor in OLD.items()}
        flat = wrong[name].view(-1)
        flat[element % flat.numel()] += 1
        with pytest.raises(PatchError):
            patch.apply(wrong, DATA)


def test_a_wrong_base_is_refused_by_its_digests():
    first, second, third = versions(3)
    digests = {name: tensor_digest(tensor) for name, tensor in second.items()}
    data = patch.encode(first, third)
    with pytest.raises(PatchError, match="other weights"):
        patch.apply_with_digests(second, data, digests=digests)


def test_wrong_shape_dtype_and_names_are_refused():
    for wrong in (
        OLD | {"a": OLD["a"].reshape(-1)},
        OLD | {"a": OLD["a"].half()},
        OLD | {"d": OLD["a"]},
        {name: tensor for name, tensor in OLD.items() if name != "b"},
        {("x" if name == "b" else name): tensor for name, tensor in OLD.items()},
    ):
        digests = {name: tensor_digest(tensor) for name, tensor in wrong.items()}
        with pytest.raises(PatchError, match="other weights"):
            patch.apply_with_digests(wrong, DATA, digests=digests)
        with pytest.raises(ProtocolError):
            patch.apply(wrong, DATA)


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
def test_streaming_completes_tensors_as_they_arrive(piece):
    stream = patch.StreamingApply(OLD)
    names = [name for start in range(0, len(DATA), piece) for name in stream.feed(DATA[start : start + piece])]
    assert sorted(names) == sorted(OLD)
    assert same_bits(stream.finish().weights, NEW)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_parts_end_behind_frames_and_joined_they_are_the_patch(part_bytes, threads):
    parts = patch.split_parts(DATA, part_bytes)
    assert b"".join(parts) == DATA
    assert all(len(part) >= part_bytes for part in parts[:-1])
    stream = patch.StreamingApply(OLD, threads=threads)
    names = [stream.feed(part) for part in parts]
    assert sorted(name for part in names for name in part) == sorted(OLD)
    assert all(names[1:]), "a part completes no tensor"
    result = stream.finish()
    assert same_bits(result.weights, NEW)
    assert list(result.weights) == list(OLD)


def test_no_patch_has_more_parts_than_a_manifest_may_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("protocol.limits.MAX_PATCH_PARTS", 2)
    assert 1 <= len(patch.split_parts(DATA, 1)) <= 2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_frame_that_was_refused_cannot_be_passed_over(threads):
    stream = patch.StreamingApply(OLD, threads=threads)
    with pytest.raises(ProtocolError):
        stream.feed(DATA[:-1] + bytes([DATA[-1] ^ 1]))
        stream.finish()
    with pytest.raises(PatchError, match="cut off"):
        stream.finish()


def test_streaming_refuses_too_few_and_too_many_bytes():
    with pytest.raises(PatchError, match="cut off"):
        patch.StreamingApply(OLD).finish()
    stream = patch.StreamingApply(OLD)
    stream.feed(DATA[:-1])
    with pytest.raises(PatchError, match="cut off"):
        stream.finish()
    with pytest.raises(PatchError, match="behind the end"):
        patch.StreamingApply(OLD).feed(DATA + b"\0")


def test_truncation_is_malformed_at_every_length():
    old, new = versions(2, (8, 40))
    data = patch.encode(old, new)
    for length in range(len(data)):
        with pytest.raises(MalformedError):
            patch.apply(old, data[:length])
