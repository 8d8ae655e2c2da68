"""Inner products in float64 that have the same bits on every processor.

BLAS and numpy add in an order that depends on the processor, and so does Python's `sum` on its version. Here the order
is fixed: the product with index n is added to partial sum n mod LANES, and then the partial sums are added in their
order. Each product and each sum is rounded once: numba's defaults fuse and reorder nothing.
"""

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.kernels.jit import kernel

Matrix = NDArray[np.float64]

LANES: Final = 64
"""Partial sums: the loop over them is compiled to SIMD, and is long enough that no addition waits for the one before.
"""

BYTE: Final = 8
"""Bits of a byte."""

_SIGNS: Final = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1.0


@kernel
def _in_order(values: Any, vector: Any, sums: Any) -> Any:
    sums[:] = 0.0
    whole = vector.size // LANES * LANES
    for begin in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += numba.float64(values[begin + lane]) * vector[begin + lane]
    for place in range(whole, vector.size):
        sums[place - whole] += numba.float64(values[place]) * vector[place]
    total = 0.0
    for lane in range(LANES):
        total += sums[lane]
    return total


@kernel
def _products(rows: Any, vector: Any, sums: Any, result: Any) -> None:
    for row in range(len(rows)):
        result[row] = _in_order(rows[row], vector, sums)


@kernel
def _add_scaled(total: Any, values: Any, factor: Any) -> Any:
    for place in range(values.size):
        total[place] += factor * numba.float64(values[place])
    return 0


@kernel
def _add_signed(sums: Any, values: Any, bits: Any, signs: Any) -> Any:
    whole = values.size // BYTE * BYTE
    for begin in range(0, whole, sums.size):
        for place in range(begin, min(begin + sums.size, whole), BYTE):
            byte = bits[place // BYTE]
            for lane in range(BYTE):
                sums[place - begin + lane] += signs[byte, lane] * numba.float64(values[place + lane])
    for place in range(whole, values.size):
        sums[place % sums.size] += signs[bits[place // BYTE], place % BYTE] * numba.float64(values[place])
    return 0


def product(values: NDArray[np.float32], vector: Matrix) -> float:
    """Return the product of float32 [n] and float64 [n]."""
    return float(_in_order(values, vector, np.empty(LANES)))


def add_scaled(total: Matrix, values: NDArray[np.float32], factor: float) -> None:
    """Add factor * values, float32 [n], to total, float64 [n]."""
    _add_scaled(total, values, factor)


def add_signed(sums: Matrix, values: NDArray[np.float32], bits: NDArray[np.uint8]) -> None:
    """Add each value, float32 [n], with a sign to the sum with its index modulo their number, float64 [m], m a multiple
    of 8. There is a bit for each value, the highest of a byte first, 1 for a positive sign: uint8 [ceil(n / 8)].
    """
    _add_signed(sums, values, bits, _SIGNS)


def row_products(rows: Matrix, vector: Matrix) -> Matrix:
    """Compute rows @ vector: float64 [R] from contiguous [R, n] and [n]."""
    result = np.empty(len(rows))
    _products(rows, vector, np.empty(LANES), result)
    return result


def dot(left: ArrayLike, right: ArrayLike) -> float:
    """Return the sum of the products of the elements of two arrays of one size, row by row."""
    one, other = (np.ascontiguousarray(array, np.float64).reshape(1, -1) for array in (left, right))
    return float(row_products(one, other[0])[0])
