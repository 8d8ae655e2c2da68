"""Adapters for the calibration of a LoRA run: those of version 0 change nothing, so nodes would round as without."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from grailnode.engine.lora_model import initial_adapters
from protocol.digest import Weights
from protocol.lora import DOWN, PREFIX, UP

ADAPTER_SHARE: Final = 0.05
"""By how much an adapter changes its matrix unless the founder says otherwise (docs/adr/0340)."""


def random_adapters(
    base: Weights, shapes: Mapping[str, tuple[int, ...]], scale: float, share: float, seed: int
) -> dict[str, Tensor]:
    """Return BF16 adapters by PEFT's names, with A as in version 0 and a random B.

    Args:
        base: the matrices that they change.
        shapes: of the model with its adapters, by the names of its modules.
        scale: alpha / rank.
        share: by how much an adapter changes its matrix: |alpha / rank B A| / |W|, Frobenius norms.
    """
    adapters = initial_adapters({PREFIX + name: shape for name, shape in shapes.items() if name.endswith((DOWN, UP))})
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in adapters if name.endswith(UP)]:
        module = name.removesuffix(UP)
        down = adapters[module + DOWN].to(torch.float32)
        up = torch.randn(adapters[name].shape, generator=generator)
        length = ((up.t() @ up) * (down @ down.t())).sum().sqrt() * scale  # of the product, which is not computed
        matrix = base[f"{module.removeprefix(PREFIX)}.weight"]
        adapters[name] = (up * (share * matrix.to(torch.float32).norm() / length)).to(torch.bfloat16)
    return adapters
