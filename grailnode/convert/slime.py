"""slime's version directories: weight_v%06d/ with an index and one safetensors file.

`model.safetensors.index.json` has the metadata version, base_version (six digits each), delta_encoding,
compression_format and checksum_format, and the weight map. Each changed tensor is stored under its name as 1-D uint8:
the zstd frame of its delta. With the encoding `xor` that is the XOR of its old and new bytes; with `overwrite`, the
number of changed bytes, their places, and their new values (numbers are u4, little-endian). The metadata of the
safetensors file have the checksum of its new bytes under its name. A first version has no base_version and holds whole
tensors.

Both encodings and the checksums adler32, blake3 and xxh3-128 are read; xor and adler32 are written.
"""

import importlib
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from blake3 import blake3
from numpy.typing import NDArray

from grailnode import UserError
from protocol import bounded_json, limits
from protocol.chain import safetensors as checked
from protocol.compression import compress, decompress
from protocol.digest import Weights, raw_bytes
from protocol.errors import LimitError, MalformedError, PatchError, error_context

INDEX: Final = "model.safetensors.index.json"
SHARD: Final = "model-00001-of-00001.safetensors"
FORMATS: Final = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}

_NUMBER: Final = 4  # bytes of a number in a delta

Files = Mapping[str, bytes]
"""Files of one version by their name inside its directory."""


def _adler32(data: memoryview) -> str:
    return f"{zlib.adler32(data):08x}"


def _xxh3_128(data: memoryview) -> str:
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError as error:
        raise UserError("checksums of the form xxh3-128 need a package: pip install xxhash") from error
    digest: str = xxhash.xxh3_128(data).hexdigest()
    return digest


_CHECKSUMS: Final[dict[str, Callable[[memoryview], str]]] = {
    "adler32": _adler32,
    "blake3": lambda data: blake3(data).hexdigest(),
    "xxh3-128": _xxh3_128,
}


def _xor(raw: NDArray[np.uint8], delta: NDArray[np.uint8]) -> None:
    if len(delta) != len(raw):
        raise PatchError(f"a delta of {len(delta)} bytes for a tensor of {len(raw)}")
    raw ^= delta


def _overwrite(raw: NDArray[np.uint8], delta: NDArray[np.uint8]) -> None:
    count = int.from_bytes(delta[:_NUMBER].tobytes(), "little")
    end = _NUMBER * (1 + count)
    if len(delta) != end + count:
        raise PatchError(f"a delta of {len(delta)} bytes that has {count} changes")
    places = np.frombuffer(delta[_NUMBER:end].tobytes(), "<u4")
    if count and int(places.max()) >= len(raw):
        raise PatchError("a change behind the end of the tensor")
    raw[places] = delta[end:]


_ENCODINGS: Final[dict[str, Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]]] = {
    "xor": _xor,
    "overwrite": _overwrite,
}


def _delta(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    xor = np.frombuffer(raw_bytes(old), np.uint8) ^ np.frombuffer(raw_bytes(new), np.uint8)
    return torch.frombuffer(bytearray(compress(xor.tobytes(), 1)), dtype=torch.uint8)


def write_slime(
    new: Weights, version: int, base: Weights | None = None, base_version: int | None = None
) -> tuple[str, dict[str, bytes]]:
    """Return a delta from `base` (which has `base_version`), or a full version: the directory's name and its files.

    ValueError if only one of `base` and `base_version` is present, or `base` has other tensors.
    """
    if (base is None) != (base_version is None) or (base is not None and base.keys() != new.keys()):
        raise ValueError("a delta needs the base weights, with the same tensors, and their version")
    metadata = {"version": f"{version:06d}"}
    tensors = dict(new)
    if base is not None and base_version is not None:
        metadata |= {"base_version": f"{base_version:06d}", **FORMATS}
        names = [name for name in new if raw_bytes(base[name]) != raw_bytes(new[name])]
        tensors = {name: _delta(base[name], new[name]) for name in names}
    sums = {name: _adler32(raw_bytes(new[name])) for name in tensors}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(sorted(tensors), SHARD)}
    return f"weight_v{version:06d}", {
        INDEX: json.dumps(index, indent=2, sort_keys=True).encode(),
        SHARD: safetensors.torch.save(tensors, sums),
    }


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise MalformedError("without metadata and weight_map", INDEX)
    return value


def _check_version(metadata: Mapping[str, str], field: str) -> None:
    if not re.fullmatch(r"[0-9]{6,12}", metadata.get(field, "")):
        raise MalformedError(f"{field} is not six digits", INDEX)


def _apply_delta(name: str, base: torch.Tensor, delta: torch.Tensor, encoding: str) -> torch.Tensor:
    if delta.dtype != torch.uint8 or delta.dim() != 1:
        raise PatchError("not a compressed delta", name)
    most = _NUMBER + (_NUMBER + 1) * base.nbytes  # all bytes are overwritten
    content = np.frombuffer(decompress(delta.numpy().tobytes(), most), np.uint8)
    new = base.detach().clone()
    with error_context(name):
        _ENCODINGS[encoding](new.view(-1).view(torch.uint8).numpy(), content)
    return new


def read_slime(files: Files, base: Weights | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a full version, or of a delta that applies to `base`; checksums are checked.
    MalformedError, LimitError if files are missing, or have another form; PatchError for a delta without a base, or one
    that does not fit it, or a wrong checksum.
    """
    if INDEX not in files:
        raise MalformedError("no index", INDEX)
    data = files[INDEX]
    if len(data) > limits.MAX_SAFETENSORS_HEADER_BYTES:
        raise LimitError(f"an index of {len(data)} bytes", INDEX)
    with error_context(INDEX):
        index = bounded_json.parse(data)
    fields = index if isinstance(index, dict) else {}
    metadata, weight_map = _strings(fields.get("metadata")), _strings(fields.get("weight_map"))
    tensors: dict[str, torch.Tensor] = {}
    sums: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        if file not in files:
            raise MalformedError("a file of the weight map is missing", file)
        with error_context(file):
            tensors |= checked.read(files[file])
            sums |= checked.read_metadata(files[file])
    if tensors.keys() != weight_map.keys():
        raise MalformedError("other tensors than in the weight map", INDEX)
    _check_version(metadata, "version")
    checksum_format = metadata.get("checksum_format", FORMATS["checksum_format"])
    if checksum_format not in _CHECKSUMS:
        raise MalformedError(f"its checksums have none of the forms {', '.join(_CHECKSUMS)}", INDEX)
    if "base_version" in metadata:
        _check_version(metadata, "base_version")
        encoding = metadata.get("delta_encoding", "")
        if encoding not in _ENCODINGS or metadata.get("compression_format") != FORMATS["compression_format"]:
            raise MalformedError(f"its deltas are not zstd frames of {' or '.join(_ENCODINGS)}", INDEX)
        if base is None or tensors.keys() - base.keys():
            raise PatchError("a delta needs the weights that it was made for")
        tensors = {n: _apply_delta(n, old, tensors[n], encoding) if n in tensors else old for n, old in base.items()}
    for name, checksum in sums.items():
        if name not in tensors or _CHECKSUMS[checksum_format](raw_bytes(tensors[name])) != checksum:
            raise PatchError("the checksum is wrong: another base, or a damaged file", name)
    return tensors
