"""Weight digests: they depend on every bit, name, dtype and shape, and on nothing else."""

import hashlib

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol.digest import content_digest, digest_weights, raw_bytes, tensor_digest, type_names, weights_digest
from protocol.encoding import pack
from protocol.errors import MalformedError
from tests.support.builders import samples


def test_the_order_of_the_mapping_does_not_matter() -> None:
    weights = samples.weights()
    assert digest_weights(dict(reversed(weights.items()))) == digest_weights(weights)


def test_digests_follow_their_definition() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    inner = blake3(bytes.fromhex("803f00c0")).digest()
    assert tensor_digest(tensor) == inner
    assert digest_weights({"w": tensor}) == blake3(pack((("w", "BF16", (2,), inner),))).digest()


@given(st.binary(min_size=8, max_size=8), st.integers(0, 63))
def test_every_bit_changes_the_digest(data: bytes, bit: int) -> None:
    """This includes the bits of -0.0, NaN payloads and infinities."""
    alteration = bytearray(data)
    alteration[bit // 8] ^= 1 << (bit % 8)
    for dtype in type_names:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        other = torch.frombuffer(alteration, dtype=torch.uint8).view(dtype)
        assert raw_bytes(tensor).tobytes() == data
        assert digest_weights({"w": tensor}) != digest_weights({"w": other})


def test_zeros_have_signs_and_nans_have_payloads() -> None:
    nans = torch.tensor([0x7FC0, 0x7FC1, -64], dtype=torch.int16).view(torch.bfloat16)
    assert nans.isnan().all()
    assert len({tensor_digest(nan) for nan in nans}) == 3
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))


def test_name_dtype_and_shape_change_the_digest() -> None:
    tensor = torch.zeros(4, dtype=torch.int16)
    variants = [
        {"a": tensor},
        {"b": tensor},
        {"a": tensor.view(torch.bfloat16)},
        {"a": tensor.reshape(2, 2)},
        {"a": tensor.reshape(4, 1)},
        {"a": tensor, "b": tensor[:0]},
    ]
    assert len({digest_weights(weights) for weights in variants}) == len(variants)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_odd_shapes_have_digests(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.float32)
    assert tensor_digest(tensor) == blake3(bytes(4 * tensor.numel())).digest()


def test_several_threads_give_the_same_digest() -> None:
    tensor = torch.arange(1 << 19, dtype=torch.int32)
    assert tensor_digest(tensor) == blake3(tensor.numpy().tobytes()).digest()


def test_files_are_named_by_sha_256() -> None:
    assert content_digest(b"abc") == hashlib.sha256(b"abc").digest()


def test_invalid_tensors_have_no_digest() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        tensor_digest(torch.zeros(2, 3).T)
    with pytest.raises(ValueError, match="one digest for each tensor"):
        weights_digest({}, {"a": torch.zeros(1)})
    with pytest.raises(MalformedError, match="may not have the dtype"):
        digest_weights({"a": torch.zeros(1, dtype=torch.float64)})
