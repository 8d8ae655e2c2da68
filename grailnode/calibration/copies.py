"""Cheaper copies of a policy that a miner could pass off as it: weights rounded to few bits."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from grailnode.engine.lora_model import initial_adapters
from protocol.digest import Weights
from protocol.lora import DOWN, PREFIX, UP

GROUP: Final = 32
"""Weights that share a scale and a zero: as few as in any 4-bit format in use, so that the copy is a good one."""

_UNROUNDED: Final = ("embed", "lm_head")  # such formats do not round them
ADAPTER_SHARE: Final = 0.05
"""By how much an adapter changes its matrix unless the founder says otherwise (docs/adr/0340)."""


def quantized(weights: Weights, bits: int) -> dict[str, Tensor]:
    """Return the weights of a quantized checkpoint: each group of 32 rounded to 2**bits even steps over its range.

    Only matrices are rounded, and not the embedding and the output projection, which makes the copy better. Shapes and
    dtypes stay.
    """

    def is_rounded(name: str, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and not any(part in name for part in _UNROUNDED)

    return {name: _rounded(tensor, bits) if is_rounded(name, tensor) else tensor for name, tensor in weights.items()}


def _rounded(tensor: Tensor, bits: int) -> Tensor:
    rows, columns = tensor.shape
    wide = torch.nn.functional.pad(tensor.to(torch.float32), (0, -columns % GROUP), mode="replicate")
    groups = wide.reshape(rows, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    steps = ((groups - low) / step).round()
    rounded: Tensor = (low + steps * step).reshape(rows, -1)[:, :columns]
    return rounded.to(tensor.dtype).contiguous()


def random_adapters(
    base: Weights, shapes: Mapping[str, tuple[int, ...]], scale: float, share: float, seed: int
) -> dict[str, Tensor]:
    """Return BF16 adapters by PEFT's names, with A as in version 0 and a random B. `scale` is alpha / rank; `share` is
    by how much an adapter changes its matrix: |alpha / rank B A| / |W|, Frobenius norms.
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
