"""The FP32 arithmetic of a round, the same on every machine (docs/spec/pseudogradient.md, section 2).

Each function computes one formula element by element. Every operation in it is rounded once, to nearest, ties to even,
and subnormal numbers are kept: no operations are fused, reordered or computed with more bits. Sums go in the order that
the caller gives.
"""

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError
from protocol.kernels.jit import kernel
from protocol.kernels.simd import VECTOR_SIZE, add_squares, bits_of_float

Floats = NDArray[np.float32]
"""A part's elements, flat: float32."""

LANES: Final = 8
"""Partial sums of a squared norm; the element with index i of a part is added to the sum i mod LANES."""

Lanes = NDArray[np.float64]
"""The partial sums of a part: float64 [LANES]."""

INFINITE: Final = 0x7F800000
"""The exponent bits of infinity and NaN."""

F: Any = numba.float32
W: Any = numba.uint32
D: Any = numba.float64


# Loops without branches or calls, which are compiled to SIMD. numba's defaults keep IEEE arithmetic: nothing is fused,
# reordered or flushed to zero, and each scalar is a float32.


@kernel
def _update(base: Any, local: Any, feedback: Any, decay: Any, out: Any) -> Any:
    infinite = W(0)
    for i in range(base.size):
        update = decay * feedback[i] + (base[i] - local[i])
        out[i] = update
        # Infinities and NaNs have all exponent bits. Counting them needs no branch.
        infinite += W(W(bits_of_float(update) & W(INFINITE)) == W(INFINITE))
    return numba.int64(infinite)


@kernel
def _add(total: Any, values: Any, weight: Any) -> Any:
    for i in range(total.size):
        total[i] = total[i] + weight * values[i]
    return 0


@kernel
def _divide(total: Any, count: Any) -> Any:
    for i in range(total.size):
        total[i] = total[i] / count
    return 0


@kernel
def _nesterov(base: Any, momentum: Any, mean: Any, decay: Any, rate: Any) -> Any:
    for i in range(base.size):
        # Nesterov: the step looks ahead along the new momentum.
        momentum[i] = decay * momentum[i] + mean[i]
        base[i] = base[i] - rate * (decay * momentum[i] + mean[i])
    return 0


@kernel
def _descend(base: Any, mean: Any, rate: Any) -> Any:
    for i in range(base.size):
        base[i] = base[i] - rate * mean[i]
    return 0


@kernel
def _infinite(bits: Any) -> Any:
    count = W(0)
    for i in range(bits.size):
        count += W(W(bits[i] & W(INFINITE)) == W(INFINITE))
    return numba.int64(count)


@kernel
def _squares(values: Any, sums: Any) -> Any:
    # Eight sums, one for each lane of a vector: so the order of additions is that of the spec on every processor.
    whole = values.size // VECTOR_SIZE * VECTOR_SIZE
    for begin in range(0, whole, VECTOR_SIZE):
        add_squares(values, numba.uint64(begin), sums)
    for i in range(whole, values.size):
        sums[i & 7] += D(values[i]) * D(values[i])
    return 0


def pseudo_gradient(base: Floats, local: Floats, feedback: Floats, decay: float) -> Floats:
    """Return decay * feedback + (base - local), what a site would send if it sent everything: float32 [n]. `base` are
    the shared weights with which the round began, `local` the site's weights after its local steps. The decay is 1 for
    PULSELoCo, less for SparseLoCo (beta), and rounded to float32.
    """
    out = np.empty_like(base)
    _refuse_infinite(_update(base, local, feedback, np.float32(decay), out), "an update")
    return out


def add_contribution(total: Floats, values: Floats, weight: float = 1.0) -> None:
    """Set total to total + weight * values. The caller adds a round's contributions in the manifest's order."""
    _add(total, values, np.float32(weight))


def divide(total: Floats, count: int) -> None:
    """Set total to total / count, the mean over all contributions; absent entries count as zeros."""
    _divide(total, np.float32(count))


def nesterov_step(base: Floats, momentum: Floats, mean: Floats, *, decay: float = 0.9, rate: float = 0.7) -> None:
    """Make the outer step of DiLoCo and PULSELoCo in place (PULSE, algorithm 2, lines 16 and 17).

    momentum = decay * momentum + mean; base = base - rate * (decay * momentum + mean).
    """
    _nesterov(base, momentum, mean, np.float32(decay), np.float32(rate))
    check_finite(base, "the weights after the outer step")


def plain_step(base: Floats, mean: Floats, *, rate: float = 1.0) -> None:
    """Make the outer step of plain averaging and of SparseLoCo in place: base = base - rate * mean."""
    _descend(base, mean, np.float32(rate))
    check_finite(base, "the weights after the outer step")


def check_finite(values: Floats, where: str) -> None:
    """Check that there is no infinity and no NaN."""
    _refuse_infinite(_infinite(values.view(np.uint32)), where)


def _refuse_infinite(count: int, where: str) -> None:
    if count:
        raise ContributionError(f"{count} values that are not finite", where)


class SquaredNorm:
    """The sum of the squares of a contribution's values in float64, in a fixed order; `value` is the sum so far."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, values: Floats) -> None:
        """Add a part; absent entries are zeros, which change nothing."""
        sums = np.zeros(LANES)
        _squares(values, sums)
        self.add_lanes(sums)

    def add_lanes(self, sums: Lanes) -> None:
        """Add a part whose squares were added up before."""
        # The lanes of a part first, then the parts, all in their order: the head states this sum bit for bit.
        own = 0.0
        for lane in sums.tolist():
            own += lane
        self.value += own
