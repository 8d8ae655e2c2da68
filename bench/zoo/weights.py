"""Cheaper copies of a policy: fewer bits, fewer layers."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK = 32
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def quantized(weights: Mapping[str, Tensor], bits: float) -> dict[str, Tensor]:
    """Every matrix rounded to integers of so many bits with a scale for each block of 32, as weight-only quantization does.

    Args:
        bits: 2 to 16; with a fraction, that share of the matrices (every so many layers) gets one bit more.
    """
    whole, share = int(bits), bits - int(bits)
    copy, budget = {}, 0.0
    for name in sorted(weights):
        tensor = weights[name]
        if tensor.dim() < 2:
            copy[name] = tensor
            continue
        budget += share
        extra = budget >= 1.0 - 1e-9
        budget -= extra
        copy[name] = _rounded(tensor, whole + extra)
    return copy


def _rounded(matrix: Tensor, bits: int) -> Tensor:
    blocks = matrix.to(torch.float32).reshape(matrix.shape[0], -1, _BLOCK)
    largest = 2 ** (bits - 1) - 1
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / largest).clamp_min(1e-12)
    rounded: Tensor = (blocks / scale).round() * scale
    return rounded.reshape(matrix.shape).to(matrix.dtype)


def perturbed(weights: Mapping[str, Tensor], relative: float, seed: int = 0) -> dict[str, Tensor]:
    """Every weight off by a normal factor of this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor * (1 + relative * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def layers(weights: Mapping[str, Tensor]) -> int:
    """How many layers these weights have."""
    return 1 + max(int(found[1]) for name in weights if (found := _LAYER.match(name)))


def keeping(weights: Mapping[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    """The weights of a shallower model: only these layers, in this order."""
    place = {layer: index for index, layer in enumerate(kept)}
    copy = {}
    for name, tensor in weights.items():
        found = _LAYER.match(name)
        if found is None:
            copy[name] = tensor
        elif int(found[1]) in place:
            copy[f"model.layers.{place[int(found[1])]}.{name[found.end() :]}"] = tensor
    return copy


def changed_share(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> float:
    """Share of elements whose bits differ."""
    differing = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in old)
    return differing / sum(tensor.numel() for tensor in old.values())
