"""The published weights, as the forward pass reads them: masters rounded to BF16, and gradients straight through."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class RoundedWeights(Mapping[str, Tensor]):
    """Masters that are rounded each time they are read, so that there is never a rounded copy of all of them.

    Args:
        masters: float32; gradients add up in their `grad`.
    """

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = masters

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight: float32, with the gradient of the rounding taken as 1."""
        return round_straight_through(self._masters[name], torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)


def round_straight_through(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor rounded to BF16 and widened to a dtype; its gradient is that of the tensor."""
    if tensor.dtype == dtype == torch.bfloat16:
        return tensor
    rounded: Tensor = _Rounding.apply(tensor, dtype)  # type: ignore[no-untyped-call]
    return rounded


class _Rounding(torch.autograd.Function):
    """The rounding, whose derivative is taken as 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Round to nearest, ties to even."""
        ctx.dtype = tensor.dtype
        return tensor.to(torch.bfloat16).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on, in the dtype of the tensor."""
        return gradients[0].to(ctx.dtype), None
