"""The formats of other projects: conversions round-trip bit for bit, and deltas for other weights are refused."""

import json
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from grailnode import UserError
from grailnode.convert.slime import INDEX, SHARD, read_slime, write_slime
from grailnode.convert.trl import read_trl, write_trl
from protocol import patch
from protocol.compression import compress
from protocol.digest import raw_bytes
from protocol.errors import MalformedError, PatchError, ProtocolError
from tests.patch.weights import rounded_update, same_bits

CHANGING = rounded_update(64, 96, 5.0, seed=1)
SPECIAL = torch.tensor([0.0, -0.0, float("nan"), float("inf")]).bfloat16()
OLD, NEW = ({"a": a, "b": b, "c": torch.ones(5)} for a, b in zip(CHANGING, (SPECIAL, -SPECIAL), strict=True))


def test_trl_deltas_and_anchors():
    anchor_path, anchor = write_trl(OLD, 10)
    delta_path, delta = write_trl(NEW, 11, OLD)
    assert (anchor_path, delta_path) == ("anchors/step_000010.safetensors", "deltas/step_000011.safetensors")
    header = json.loads(anchor[8 : 8 + int.from_bytes(anchor[:8], "little")])["__metadata__"]
    assert (header["sparse"], json.loads(header["changed_params"])) == ("False", ["a", "b", "c"])
    base = read_trl(anchor)
    assert same_bits(base, OLD)
    assert same_bits(read_trl(delta, base), NEW)


def test_trl_tensors_and_metadata_have_their_form():
    _, data = write_trl(NEW, 3, OLD)
    tensors = safetensors.torch.load(data)
    assert sorted(tensors) == ["a.indices", "a.values", "b.indices", "b.values"]
    assert tensors["a.indices"].dtype == torch.int32
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert header["format"] == "sparse_weight_patch"
    assert header["sparse"] == "True"  # TRL's receiver takes any other value for that of an anchor
    assert json.loads(header["changed_params"]) == ["a", "b"]
    assert int(header["total_changed_elements"]) == patch.summary(patch.encode(OLD, NEW)).changed


def test_trl_deltas_for_other_weights_are_refused():
    _, delta = write_trl(NEW, 3, OLD)
    with pytest.raises(PatchError, match="needs the weights"):
        read_trl(delta)
    with pytest.raises(PatchError):
        read_trl(delta, {"x": OLD["a"]})
    with pytest.raises(PatchError):
        read_trl(delta, OLD | {"a": OLD["a"][:1]})
    with pytest.raises(MalformedError):
        read_trl(safetensors.torch.save({"a": OLD["a"]}), OLD)


def test_slime_versions():
    name, full = write_slime(OLD, 4)
    assert name == "weight_v000004"
    base = read_slime(full)
    name, delta = write_slime(NEW, 5, OLD, 4)
    assert name == "weight_v000005"
    assert same_bits(read_slime(delta, base), NEW)
    metadata = json.loads(delta[INDEX])["metadata"]
    assert metadata == {
        "version": "000005", "base_version": "000004", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "adler32",
    }  # fmt: skip


def slime_files(delta: bytes | None = None, **metadata: str) -> dict[str, bytes]:
    """Return the files of a delta as slime's publisher may write them: version 5 on 4, with other metadata.

    Args:
        delta: in place of that of each tensor, before it is compressed.
    """
    _, files = write_slime(NEW, 5, OLD, 4)
    index = json.loads(files[INDEX])
    index["metadata"] |= metadata
    checksum: dict[str, Callable[[bytes], str]] = {
        "adler32": lambda data: f"{zlib.adler32(data):08x}",
        "blake3": lambda data: blake3(data).hexdigest(),
    }
    changed = {name: (bytes(raw_bytes(OLD[name])), bytes(raw_bytes(NEW[name]))) for name in index["weight_map"]}
    encoding = {"xor": xor, "overwrite": overwrite}[index["metadata"]["delta_encoding"]]
    deltas = {name: encoding(*both) if delta is None else delta for name, both in changed.items()}
    tensors = {name: torch.frombuffer(bytearray(compress(delta)), dtype=torch.uint8) for name, delta in deltas.items()}
    form: Callable[[bytes], str] = checksum.get(index["metadata"]["checksum_format"], lambda _data: "0" * 32)
    sums = {name: form(both[1]) for name, both in changed.items()}
    return {INDEX: json.dumps(index).encode(), SHARD: safetensors.torch.save(tensors, sums)}


def xor(old: bytes, new: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(old, new, strict=True))


def overwrite(old: bytes, new: bytes) -> bytes:
    places = [place for place in range(len(old)) if old[place] != new[place]]
    return struct.pack(f"<{1 + len(places)}I", len(places), *places) + bytes(new[place] for place in places)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["adler32", "blake3"])
def test_slime_deltas_of_every_form_are_read(encoding, checksum):
    files = slime_files(delta_encoding=encoding, checksum_format=checksum)
    assert same_bits(read_slime(files, OLD), NEW)
    with pytest.raises(PatchError, match="checksum"):
        read_slime(files, OLD | {"a": torch.zeros_like(OLD["a"])})
    with pytest.raises(MalformedError):
        read_slime({INDEX: files[INDEX]}, OLD)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<2I", 1, 1 << 20) + b"\0",  # behind the end of every tensor
        struct.pack("<2I", 1, 0),  # without its value
        struct.pack("<I", 1 << 31),
        b"\1\0",
        b"",
    ],
)
def test_slime_overwrites_that_do_not_fit_are_refused(content):
    files = slime_files(content, delta_encoding="overwrite")
    with pytest.raises(PatchError):
        read_slime(files, OLD)


def test_a_checksum_that_needs_a_package_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UserError, match="pip install xxhash"):
        read_slime(slime_files(checksum_format="xxh3-128"), OLD)


@pytest.mark.parametrize(
    "metadata", [{"delta_encoding": "sum"}, {"checksum_format": "md5"}, {"compression_format": "lz4"}]
)
def test_slime_deltas_of_an_unknown_form_are_refused(metadata):
    _, files = write_slime(NEW, 5, OLD, 4)
    index = json.loads(files[INDEX])
    index["metadata"] |= metadata
    with pytest.raises(MalformedError):
        read_slime(files | {INDEX: json.dumps(index).encode()}, OLD)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_raise_only_protocol_errors(seed):
    random = torch.Generator().manual_seed(seed)
    _, delta = write_trl(NEW, 3, OLD)
    _, files = write_slime(NEW, 5, OLD, 4)
    for _ in range(60):
        at = int(torch.randint(0, 1 << 30, (), generator=random))
        for name in (INDEX, SHARD):
            mutant = bytearray(files[name])
            mutant[at % len(mutant)] ^= 1 << (at >> 20) % 8
            with suppress(ProtocolError):
                read_slime(files | {name: bytes(mutant)}, OLD)
        mutant = bytearray(delta)
        mutant[at % len(mutant)] ^= 1 << (at >> 20) % 8
        with suppress(ProtocolError):
            read_trl(bytes(mutant), OLD)
