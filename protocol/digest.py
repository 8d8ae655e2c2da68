"""Content names and weight digests (docs/spec/chain.md).

Files are named by their SHA-256. Weights are digested with BLAKE3 per tensor over the raw little-endian bytes, then
BLAKE3 over the canonical table of (name, dtype, shape, tensor digest), so a mismatch says which tensor is wrong and an
unchanged tensor keeps its digest.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

import torch
from blake3 import blake3

from protocol.encoding import pack
from protocol.errors import MalformedError

type_names: Final[dict[torch.dtype, str]] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
}
"""Dtypes that may travel, by their safetensors names."""

dtypes: Final = {name: dtype for dtype, name in type_names.items()}

Weights = Mapping[str, torch.Tensor]
"""A model's tensors by name: contiguous CPU tensors of the dtypes above."""


def content_digest(data: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of a file's bytes: 32 bytes, the name of the file."""
    return hashlib.sha256(data).digest()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements as they lie in memory (little-endian, row-major), without a copy.

    Raises:
        ValueError: the tensor is not contiguous or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("digests are taken of contiguous CPU tensors")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """BLAKE3 of the tensor's raw bytes: 32 bytes. Large tensors are hashed on several threads."""
    data = raw_bytes(tensor)
    hasher = blake3(max_threads=blake3.AUTO if data.nbytes > (1 << 20) else 1)
    return hasher.update(data).digest()


def type_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype.

    Raises:
        MalformedError: a dtype that does not travel.
    """
    try:
        return type_names[dtype]
    except KeyError:
        raise MalformedError(f"dtype {dtype} does not travel") from None


def weights_digest(tensor_digests: Mapping[str, bytes], weights: Weights) -> bytes:
    """BLAKE3 over the canonical table of the weights: 32 bytes.

    Args:
        tensor_digests: each tensor's BLAKE3 by name; the keys are those of `weights`.
        weights: the tensors, for their dtypes and shapes.
    """
    if tensor_digests.keys() != weights.keys():
        raise ValueError("one digest for each tensor")
    table = tuple(
        (name, type_name(weights[name].dtype), tuple(weights[name].shape), tensor_digests[name])
        for name in sorted(weights)
    )
    return blake3(pack(table)).digest()


def digest_weights(weights: Weights) -> bytes:
    """The weights' digest from scratch: reads every tensor once."""
    return weights_digest({name: tensor_digest(tensor) for name, tensor in weights.items()}, weights)
