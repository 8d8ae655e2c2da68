"""TRL's delta weight sync: anchors/step_%06d.safetensors and deltas/step_%06d.safetensors.

An anchor holds whole tensors, a delta `{name}.indices` (int32, flat, ascending) and `{name}.values` of every changed
tensor. The key `sparse` of the metadata tells them apart: TRL's receiver compares it with "True". Source: TRL's
documentation of its delta weight sync, and TRL's PatchMetadata.
"""

import json
from collections.abc import Mapping
from typing import Final

import safetensors.torch
import torch

from protocol.chain import safetensors as checked
from protocol.digest import Weights
from protocol.errors import LimitError, MalformedError, PatchError
from protocol.patch.values import bits_of

FORMAT: Final = "sparse_weight_patch"
FORMAT_VERSION: Final = "1"
MAX_INDEX: Final = 2**31 - 1


def _metadata(version: int, total: int, changes: Mapping[str, int], *, is_sparse: bool) -> dict[str, str]:
    count = sum(changes.values())
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "sparse": str(is_sparse),
        "model_version": str(version),
        "changed_params": json.dumps(sorted(changes)),
        "num_changed_params": str(len(changes)),
        "total_changed_elements": str(count),
        "total_elements": str(total),
        "sparsity": str(1.0 - count / max(1, total)),
    }


def write_trl(new: Weights, version: int, base: Weights | None = None) -> tuple[str, bytes]:
    """Return a delta from `base`, or an anchor if there is no base: its path in the bucket and its bytes.

    LimitError for a tensor with more elements than int32 can index, ValueError if `base` has other tensors than `new`.
    """
    total = sum(tensor.numel() for tensor in new.values())
    if base is None:
        sizes = {name: tensor.numel() for name, tensor in new.items()}
        data = safetensors.torch.save(dict(new), _metadata(version, total, sizes, is_sparse=False))
        return f"anchors/step_{version:06d}.safetensors", data
    if base.keys() != new.keys():
        raise ValueError("base and new weights must have the same tensors")
    tensors: dict[str, torch.Tensor] = {}
    changes: dict[str, int] = {}
    for name, tensor in new.items():
        if tensor.numel() > MAX_INDEX:
            raise LimitError(f"{tensor.numel()} elements are more than int32 can index", name)
        differs = torch.from_numpy(bits_of(base[name]) != bits_of(tensor))
        indices = torch.nonzero(differs).reshape(-1)
        if len(indices):
            changes[name] = len(indices)
            tensors[f"{name}.indices"] = indices.to(torch.int32)
            tensors[f"{name}.values"] = tensor.detach().reshape(-1)[indices]
    data = safetensors.torch.save(tensors, _metadata(version, total, changes, is_sparse=True))
    return f"deltas/step_{version:06d}.safetensors", data


def _number(metadata: Mapping[str, str], field: str) -> int:
    value = metadata.get(field, "")
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise MalformedError(f"{field}={value[:32]!r} is not a number")
    return int(value)


def _apply_delta(name: str, base: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if (
        indices.dtype != torch.int32
        or indices.dim() != 1
        or values.dtype != base.dtype
        or values.shape != indices.shape
    ):
        raise PatchError("indices or values of the wrong dtype or shape", name)
    flat = indices.long()
    if len(flat) and (int(flat[0]) < 0 or int(flat[-1]) >= base.numel() or not bool((flat.diff() > 0).all())):
        raise PatchError("indices that do not ascend within the tensor", name)
    new = base.detach().clone()
    new.view(-1)[flat] = values
    return new


def read_trl(data: bytes, base: Weights | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of an anchor, or of a delta that applies to `base`. MalformedError, LimitError for no
    safetensors file, or one without TRL's metadata; PatchError for a delta without a base, or one that does not fit it.
    """
    tensors = checked.read(data)
    metadata = checked.read_metadata(data)
    if metadata.get("format") != FORMAT:
        raise MalformedError(f"metadata without format={FORMAT}")
    _number(metadata, "model_version")
    if metadata.get("sparse", "true").lower() == "false":
        return tensors
    if base is None:
        raise PatchError("a delta needs the weights that it was made for")
    names = {name.removesuffix(".indices") for name in tensors if name.endswith(".indices")}
    if tensors.keys() != {f"{name}.{part}" for name in names for part in ("indices", "values")} or names - base.keys():
        raise PatchError("indices without values, values without indices, or of tensors that the base does not have")
    weights = {
        name: _apply_delta(name, tensor, tensors[f"{name}.indices"], tensors[f"{name}.values"])
        if name in names
        else tensor
        for name, tensor in base.items()
    }
    if sum(len(tensors[f"{name}.indices"]) for name in names) != _number(metadata, "total_changed_elements"):
        raise PatchError("another number of changed elements than the metadata say")
    return weights
