"""Digests of weights (docs/spec/chain.md); those of files are `content_digest` of protocol/encoding.py.

The digest of weights is the BLAKE3 of the canonical table of (name, dtype, shape, tensor digest), where a tensor digest
is the BLAKE3 of the tensor's raw little-endian bytes. So a mismatch shows which tensor is wrong, and an unchanged
tensor keeps its digest.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

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
"""The safetensors name of each dtype that weights may have."""

dtypes: Final = {name: dtype for dtype, name in type_names.items()}

Weights = Mapping[str, torch.Tensor]
"""A model's tensors by name: contiguous CPU tensors of the dtypes above."""


class Described(Protocol):
    """What has a dtype and a shape: a tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes (little-endian, row-major) of a contiguous tensor on the CPU without a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a digest needs a contiguous tensor on the CPU")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return the BLAKE3 of the tensor's raw bytes (32 bytes). Large tensors are hashed on several threads."""
    data = raw_bytes(tensor)
    hasher = blake3(max_threads=blake3.AUTO if data.nbytes > (1 << 20) else 1)
    return hasher.update(data).digest()


def type_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype, or raise MalformedError for one that weights may not have."""
    try:
        return type_names[dtype]
    except KeyError:
        raise MalformedError(f"weights may not have the dtype {dtype}") from None


def outline(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> Weights:
    """Return tensors without data: dtypes and shapes, of which tables and digests are made without the weights."""
    return {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}


def weights_digest(tensor_digests: Mapping[str, bytes], weights: Mapping[str, Described]) -> bytes:
    """Return the BLAKE3 (32 bytes) of the canonical table of the weights, whose tensors have these digests."""
    if tensor_digests.keys() != weights.keys():
        raise ValueError("tensor_digests must have one digest for each tensor")
    table = tuple(
        (name, type_name(weights[name].dtype), tuple(weights[name].shape), tensor_digests[name])
        for name in sorted(weights)
    )
    return blake3(pack(table)).digest()


def digest_weights(weights: Weights) -> bytes:
    """Compute the digest of weights from their bytes (32 bytes); every tensor is read once."""
    return weights_digest({name: tensor_digest(tensor) for name, tensor in weights.items()}, weights)
