"""Read and write safetensors files. The reader takes hostile bytes: it checks the header's length and form first.

The format is the published one (8-byte little-endian header length, JSON header, raw data), so any tool can open an
anchor.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from protocol import bounded_json, limits
from protocol.digest import Weights, dtypes, raw_bytes, type_name
from protocol.errors import LimitError, MalformedError

_LENGTH_BYTES: Final = 8
_FILE_ORDER: Final = ("F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8")  # as the library has it


def _parse_header(data: bytes) -> dict[str, Any]:
    if len(data) < _LENGTH_BYTES:
        raise MalformedError("shorter than a safetensors header")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > limits.MAX_SAFETENSORS_HEADER_BYTES:
        raise LimitError(f"a safetensors header of {length} bytes")
    if length > len(data) - _LENGTH_BYTES:
        raise MalformedError("the safetensors header is cut off")
    try:
        header = bounded_json.parse(data[_LENGTH_BYTES : _LENGTH_BYTES + length], bounded_json.unique)
    except MalformedError as error:
        raise MalformedError(f"the safetensors header: {error.what}") from error
    if not isinstance(header, dict):
        raise MalformedError("the safetensors header is not an object")
    return header


def _natural_numbers(value: Any, largest: int) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= largest for item in value):
        raise MalformedError("a shape or an offset that is not a list of natural numbers")
    return value


def _check_name(name: str) -> None:
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise MalformedError("a tensor's name is not Unicode", ascii(name[:64])) from None
    if size > limits.MAX_NAME_BYTES:
        raise LimitError("a tensor's name is too long", name[:64])


def _read_tensor(name: str, entry: Any, body: memoryview, begin: int) -> torch.Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise MalformedError("not a tensor's entry", name)
    dtype = dtypes.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise MalformedError("weights may not have its dtype", name)
    shape = _natural_numbers(entry["shape"], limits.MAX_ELEMENTS)
    if len(shape) > limits.MAX_RANK:
        raise LimitError(f"{len(shape)} dimensions", name)
    elements = 1
    for size in shape:
        elements *= max(1, size)  # ignore zeros, because the strides of an empty tensor must be in range too
    if elements > limits.MAX_ELEMENTS:
        raise LimitError("too many elements", name)
    elements = math.prod(shape)
    end = begin + elements * dtype.itemsize
    if _natural_numbers(entry["data_offsets"], 1 << 62) != [begin, end] or end > len(body):
        raise MalformedError("its data are not where its shape says", name)
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(body[begin:end]), dtype=dtype).reshape(shape)


def read(data: bytes) -> dict[str, torch.Tensor]:
    """Read a safetensors file (hostile bytes); return its tensors by name, each in memory of its own. Metadata is
    ignored. LimitError: the header, a name, a rank, a tensor or their number exceeds its limit. MalformedError: the
    bytes break the format, or tensors overlap or leave gaps or trailing bytes.
    """
    header = _parse_header(data)
    body = memoryview(data)[_LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little") :]
    header.pop("__metadata__", None)
    if len(header) > limits.MAX_TENSORS:
        raise LimitError(f"{len(header)} tensors")
    entries = []
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        _check_name(name)
        entries.append((_natural_numbers(offsets, 1 << 62), name, entry))
    weights: dict[str, torch.Tensor] = {}
    begin = 0
    for offsets, name, entry in sorted(entries, key=lambda item: item[0]):
        weights[name] = _read_tensor(name, entry, body, begin)
        begin = offsets[1]
    if begin != len(body):
        raise MalformedError("bytes behind the last tensor")
    return weights


def read_metadata(data: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file (hostile bytes) as texts; LimitError or MalformedError if bad."""
    metadata = _parse_header(data).get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise MalformedError("metadata that are not an object")
    return {str(name): str(text) for name, text in metadata.items()}


def write(weights: Weights) -> bytes:
    """Serialize contiguous CPU tensors to the bytes that the library safetensors writes, with one copy in memory."""
    header, names = file_head(weights)
    return b"".join((header, *(raw_bytes(weights[name]) for name in names)))


def file_head(weights: Weights) -> tuple[bytes, list[str]]:
    """Return what a file of some tensors begins with, and the order of their data in it. No element is read."""
    names = sorted(weights, key=lambda name: (_FILE_ORDER.index(type_name(weights[name].dtype)), name))
    entries, end = {}, 0
    for name in names:
        tensor = weights[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": type_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header, names


def shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Distribute tensors of these sizes in bytes over shards in order of name; a new shard begins when the next tensor
    would exceed `shard_bytes`. Return the tensor names of each shard.
    """
    result: list[list[str]] = [[]]
    total = 0
    for name in sorted(sizes):
        if result[-1] and total + sizes[name] > shard_bytes:
            result.append([])
            total = 0
        result[-1].append(name)
        total += sizes[name]
    return result
