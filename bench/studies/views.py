"""Rounded weights as integers, one for each bit pattern: a change that engines see is a change of an integer."""

from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8 e4m3": torch.float8_e4m3fn,
    "float8 e5m2": torch.float8_e5m2,
}
BLOCK: Final = 128
"""Weights that share a scale in a dtype of 8 bits."""
_INTEGERS: Final = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_MANTISSA: Final = 7  # bits of BF16 below the exponent
_LEAST_EXPONENT: Final = -133  # of BF16's smallest subnormal number


class View:
    """Weights rounded to a dtype.

    In 8 bits, each block of 128 weights is divided by a scale that maps the largest of its first values to the largest
    number of the dtype. The scales do not change afterwards.

    Args:
        first: float32 [N], of which scales are made.
    """

    def __init__(self, dtype: torch.dtype, first: Tensor) -> None:
        self._dtype = dtype
        self._scales: Tensor | None = None
        if dtype.itemsize == 1:
            largest = _blocks(first).abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            self._scales = largest / torch.finfo(dtype).max

    def of(self, weights: Tensor) -> Tensor:
        """Return the bit patterns of rounded weights: integers [N] of the dtype's width."""
        if self._scales is not None:
            bound = torch.finfo(self._dtype).max
            scaled = (_blocks(weights) / self._scales).clamp(-bound, bound)
            weights = scaled.flatten()[: len(weights)]
        return weights.to(self._dtype, copy=True).view(_INTEGERS[self._dtype.itemsize])


class ShareByDistance:
    """The shares of values that differ between states k steps apart.

    Attributes:
        shares: by k, then by the step of the earlier state.
    """

    def __init__(self, dtype: torch.dtype, first: Tensor, distances: Sequence[int]) -> None:
        self._view = View(dtype, first)
        self._views: deque[Tensor] = deque(maxlen=max(distances) + 1)
        self.shares: dict[int, list[float]] = {distance: [] for distance in distances}

    def add(self, weights: Tensor) -> None:
        """Compare the next state, float32 [N], with those before."""
        self._views.append(self._view.of(weights))
        for distance, shares in self.shares.items():
            if len(self._views) > distance:
                shares.append(changed_share(self._views[-1 - distance], self._views[-1]))


def changed_share(old: Tensor, new: Tensor) -> float:
    """Return the share of bit patterns that differ."""
    return int((old != new).sum()) / len(old)


def unit_in_last_place(weights: Tensor) -> Tensor:
    """Return the distance between BF16 numbers at each weight: float32 [N]."""
    _, exponent = torch.frexp(weights.to(torch.bfloat16).to(torch.float32))
    return torch.ldexp(torch.ones_like(weights), (exponent - 1 - _MANTISSA).clamp_min(_LEAST_EXPONENT))


def _blocks(weights: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(weights, (0, -len(weights) % BLOCK))
    return padded.view(-1, BLOCK)
