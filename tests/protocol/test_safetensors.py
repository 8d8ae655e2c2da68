"""Safetensors files, and the digests of weights."""

import json
import struct
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.chain.safetensors import read, shards, write
from protocol.digest import digest_weights, raw_bytes, tensor_digest, type_names, weights_digest
from protocol.encoding import pack
from protocol.errors import LimitError, MalformedError, ProtocolError
from tests.support.builders import samples


def file(header: object, body: bytes = b"", *, encoding: str = "utf-8") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode(encoding)
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: list[Any], begin: int, end: int, **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(list(type_names)), SHAPES), min_size=1, max_size=6), st.randoms())
def test_tensors_round_trip(specs: list[tuple[torch.dtype, list[int]]], rng: Any) -> None:
    weights = {}
    for place, (dtype, shape) in enumerate(specs):
        count = torch.Size(shape).numel() * dtype.itemsize
        bits = bytearray(rng.randbytes(count))
        tensor = torch.frombuffer(bits, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        weights[f"t{place}"] = tensor.reshape(shape)
    data = write(weights)
    again = read(data)
    assert digest_weights(again) == digest_weights(weights)
    assert digest_weights(safetensors.torch.load(data)) == digest_weights(weights)


def test_metadata_is_ignored() -> None:
    data = safetensors.torch.save({"a": torch.ones(2)}, metadata={"format": "pt"})
    assert torch.equal(read(data)["a"], torch.ones(2))


def test_tensors_own_their_memory() -> None:
    data = write(samples.weights())
    first, second = read(data), read(data)
    first["bias"].zero_()
    assert digest_weights(second) == digest_weights(samples.weights())


NAN = b'{"a":{"dtype":"I8","shape":[NaN],"data_offsets":[0,0]}}'
HOSTILE = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "a header cut off": struct.pack("<Q", 10) + b"{}",
    "no JSON": file(b"{"),
    "an array": file([]),
    "an empty header": file(b""),
    "deep JSON": file(b"[" * 100_000),
    "deep metadata": file(b'{"__metadata__":' + b'{"a":' * 100_000),
    "a number of 10,000 digits": file(b'{"a":{"dtype":"I8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,1]}}'),
    "NaN for a size": file(NAN),
    "UTF-16": file({"a": entry("I8", [1], 0, 1)}, b"x", encoding="utf-16"),
    "UTF-8 with a mark": file({"a": entry("I8", [1], 0, 1)}, b"x", encoding="utf-8-sig"),
    "not UTF-8": file(b'{"\xff":1}'),
    "a name of half a character": file(b'{"\\ud800":' + json.dumps(entry("I8", [1], 0, 1)).encode() + b"}", b"x"),
    "a name twice": file(b'{"a":1,"a":1}'),
    "a field twice": file(b'{"a":{"dtype":"I8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "no entry": file({"a": 1}),
    "a field missing": file({"a": {"dtype": "I8", "data_offsets": [0, 1]}}, b"x"),
    "a field more": file({"a": entry("I8", [1], 0, 1, more=1)}, b"x"),
    "an unknown dtype": file({"a": entry("F64", [1], 0, 8)}, bytes(8)),
    "a dtype that is a list": file({"a": {"dtype": ["I8"], "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "too wide a dtype": file({"a": entry("F32", [1], 0, 2)}, bytes(2)),
    "too narrow a dtype": file({"a": entry("I8", [1], 0, 2)}, bytes(2)),
    "a negative size": file({"a": entry("I8", [-1], 0, 1)}, b"x"),
    "a size that is true": file({"a": entry("I8", [True], 0, 1)}, b"x"),
    "a size that is a float": file({"a": entry("I8", [1.0], 0, 1)}, b"x"),
    "a huge size": file({"a": entry("I8", [1 << 62], 0, 1)}, b"x"),
    "offsets that go back": file({"a": entry("I8", [1], 1, 0)}, b"x"),
    "one offset": file({"a": {"dtype": "I8", "shape": [0], "data_offsets": [0]}}),
    "three offsets": file({"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x"),
    "data cut off": file({"a": entry("I8", [4], 0, 4)}, b"abc"),
    "data behind": file({"a": entry("I8", [4], 0, 4)}, b"abcde"),
    "data behind nothing": file({}, b"a"),
    "a gap": file({"a": entry("I8", [1], 0, 1), "b": entry("I8", [1], 2, 3)}, b"abc"),
    "a gap in front": file({"a": entry("I8", [1], 1, 2)}, b"ab"),
    "an overlap": file({"a": entry("I8", [2], 0, 2), "b": entry("I8", [2], 1, 3)}, b"abc"),
    "the same bytes twice": file({"a": entry("I8", [2], 0, 2), "b": entry("I8", [2], 0, 2)}, b"ab"),
}
TOO_LARGE = {
    "a header of 2^64 - 1 bytes": b"\xff" * 8,
    "a header over the cap": struct.pack("<Q", limits.MAX_SAFETENSORS_HEADER_BYTES + 1),
    "a name too long": file({"é" * 300: entry("I8", [1], 0, 1)}, b"x"),
    "huge sizes and a zero": file({"a": entry("I8", [1 << 40, 1 << 40, 0], 0, 0)}),
    "a product beyond 64 bits": file({"a": entry("I8", [1 << 40] * 8, 0, 0)}),
    "nine dimensions": file({"a": entry("I8", [1] * 9, 0, 1)}, b"x"),
}


@pytest.mark.parametrize("name", HOSTILE | TOO_LARGE)
def test_hostile_files(name: str) -> None:
    with pytest.raises(LimitError if name in TOO_LARGE else MalformedError) as error_info:
        read((HOSTILE | TOO_LARGE)[name])
    assert str(error_info.value).encode()


def test_any_order_in_the_header() -> None:
    """The format orders the data and not the names; empty tensors may lie anywhere between others."""
    header = {"b": entry("I8", [1], 1, 2), "z": entry("F32", [0], 1, 1), "a": entry("I8", [1], 0, 1)}
    assert {name: tensor.tolist() for name, tensor in read(file(header, b"\x01\x02")).items()} == {
        "a": [1],
        "b": [2],
        "z": [],
    }


def test_a_name_may_be_any_text() -> None:
    assert list(read(write({"größe/𝄞": torch.ones(1)}))) == ["größe/𝄞"]


ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["I8", "BF16", "F32", "I16", "X"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), ENTRIES, max_size=3), st.binary(max_size=12))
def test_the_published_library_reads_every_accepted_file_alike(header: dict[str, object], body: bytes) -> None:
    data = file(header, body)
    try:
        ours = read(data)
    except ProtocolError:
        return
    theirs = safetensors.torch.load(data)
    assert digest_weights(ours) == digest_weights(theirs)


def test_shards_contain_every_tensor_once_in_order() -> None:
    weights = {f"{place:02d}": torch.zeros(place, dtype=torch.uint8) for place in range(20)}
    names = shards({name: tensor.nbytes for name, tensor in weights.items()}, 30)
    assert [name for shard in names for name in shard] == sorted(weights)
    assert all(len(shard) == 1 or sum(weights[name].nbytes for name in shard) <= 30 for shard in names)


def test_a_file_has_the_bytes_that_the_published_library_writes() -> None:
    tensors: dict[str, torch.Tensor] = {'\u00fc"\n': torch.tensor(1.5).bfloat16(), "a\u0007": torch.zeros(0, 3)}
    for number, dtype in enumerate(type_names):
        tensors |= {f"{name}{number}": torch.arange(6).reshape(2, 3).to(dtype) for name in "zb"}
    assert write(tensors) == safetensors.torch.save(tensors)
    assert write({}) == safetensors.torch.save({})


# Weight digests: they depend on every bit, name, dtype and shape, and on nothing else


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


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1), (1 << 19,)], ids=str)
def test_odd_shapes_and_tensors_for_several_threads_have_digests(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    assert tensor_digest(tensor) == blake3(tensor.numpy().tobytes()).digest()


def test_invalid_tensors_have_no_digest() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        tensor_digest(torch.zeros(2, 3).T)
    with pytest.raises(ValueError, match="one digest for each tensor"):
        weights_digest({}, {"a": torch.zeros(1)})
    with pytest.raises(MalformedError, match="may not have the dtype"):
        digest_weights({"a": torch.zeros(1, dtype=torch.float64)})
