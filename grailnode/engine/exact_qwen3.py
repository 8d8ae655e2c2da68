"""Qwen3 in exact arithmetic: the same bits whatever the batch, the padding, the parts of a prefill, the number of
threads and the processor (docs/spec/numerics.md).

It computes what `Qwen3` computes, in float32 on a CPU, with the sums and functions of protocol/kernels/exact.py. What
is left to torch has one rounding for each element: sums, products, quotients and roots of two elements, and copies.
Shapes: as in qwen3.py.
"""

import functools
import math
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.kernels import exact

_PI_DIGITS: Final = Decimal("3.14159265358979323846264338327950288419716939937510")
_TERMS: Final = 13  # of the series of sine and cosine, for an angle below one


@functools.cache
def _frequencies(theta: float, head_size: int) -> tuple[int, ...]:
    """Return the angle between two positions for each pair of dimensions, in units of 2**-64 turns."""
    # Decimal arithmetic is the same on every machine; libm's pow is not.
    with localcontext() as context:
        context.prec = 50
        powers = [Decimal(theta) ** (Decimal(-2 * pair) / Decimal(head_size)) for pair in range(head_size // 2)]
        # A turn is 2**64 units, so that an integer overflow of position * frequency is exactly a whole turn.
        return tuple(int(power / (2 * _PI_DIGITS) * (1 << 64)) for power in powers)


@functools.cache
def _rotation(theta: float, head_size: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles of positions: float32 [P, E] each."""
    frequencies = np.array(_frequencies(theta, head_size), dtype=np.uint64)
    turns = np.arange(positions, dtype=np.uint64)[:, None] * frequencies  # modulo 2**64, which is a whole turn
    # The upper three bits are the octant, the rest is the angle within it. Each octant maps to an angle in [0, pi/4],
    # for which the series needs few terms.
    octants = (turns >> np.uint64(61)).astype(np.int64)
    angles = (turns & np.uint64((1 << 61) - 1)).astype(np.float64) * (math.pi / (1 << 63))  # in [0, pi / 4]
    # In odd octants the angle is measured from the octant's far end.
    angles = np.where(octants % 2 == 1, math.pi / 4 - angles, angles)
    small_cosines, small_sines = _series(angles, 0), _series(angles, 1)
    # In these octants cosine and sine change places; the signs follow from the quadrant.
    swapped = np.isin(octants, (1, 2, 5, 6))
    cosines = np.where(swapped, small_sines, small_cosines) * np.where(np.isin(octants, (2, 3, 4, 5)), -1.0, 1.0)
    sines = np.where(swapped, small_cosines, small_sines) * np.where(octants >= 4, -1.0, 1.0)
    cosine, sine = (torch.from_numpy(np.concatenate([x, x], axis=1).astype(np.float32)) for x in (cosines, sines))
    return cosine, sine


def _series(angles: np.ndarray, odd: int) -> np.ndarray:
    """Return the cosines (odd = 0) or the sines (odd = 1) of angles of at most one, in float64."""
    square, result = angles * angles, np.ones_like(angles)
    # Horner's scheme from the smallest term: each step is one multiplication, division and subtraction of float64,
    # which IEEE 754 rounds alike everywhere.
    for term in range(_TERMS, 0, -1):
        result = 1.0 - result * square / ((2 * term - 1 + odd) * (2 * term + odd))
    return result * angles if odd else result


class ExactQwen3(Qwen3):
    """A CausalModel (roles/policy/causal_model.py) for weights in float32 on a CPU, without gradients."""

    exact = True

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self._positions = 1024

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # The table grows by doubling, so that it is computed seldom; its rows do not depend on its size.
        while int(positions.max()) >= self._positions:
            self._positions *= 2
        cosine, sine = _rotation(self._config.rope_theta, self._config.head_dim, self._positions)
        return cosine[positions][:, None], sine[positions][:, None]

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        sums = torch.from_numpy(exact.square_sums(exact.padded(x))).view(*x.shape[:-1], 1)
        return gain * (x / torch.sqrt(sums / x.shape[-1] + self._config.rms_norm_eps))

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        # The kernels add in one fixed order (protocol/kernels/exact.py). Padding completes their blocks with zeros,
        # which add nothing.
        return torch.from_numpy(exact.products(exact.padded(x), exact.padded(weight))).view(*x.shape[:-1], len(weight))

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.from_numpy(exact.silu(gate.contiguous().numpy())) * up

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        width = queries.shape[-1]
        # The kernel computes whole blocks; padded dimensions are zero in queries and keys, and are cut from the result.
        padding = exact.padded_width(width) - width
        wide_queries, wide_keys, wide_values = (
            functional.pad(x, (0, padding)).contiguous().numpy() for x in (queries, keys, values)
        )
        mixed = exact.attend(wide_queries, wide_keys, wide_values, visible[:, 0].contiguous().numpy(), width**-0.5)
        return torch.from_numpy(mixed)[..., :width]

    def logits(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return self._project(hidden, weights[self._head])
