"""Cheaper copies of a policy: noise, fewer layers. Fewer bits are in grailnode/calibration/copies.py."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


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
