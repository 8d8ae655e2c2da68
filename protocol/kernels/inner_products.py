"""Inner products in float64 that have the same bits on every processor.

BLAS and numpy add in an order that depends on the processor, and so does Python's `sum` on its version. Here the order
is fixed: the product with index n is added to partial sum n mod LANES, and then the partial sums are added in their
order. Each product and each sum is rounded once: numba's defaults fuse and reorder nothing.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.kernels.jit import lazy_kernel

Matrix = NDArray[np.float64]

LANES: Final = 64
"""Partial sums: the loop over them is compiled to SIMD, and is long enough that no addition waits for the one before.
"""


@lazy_kernel("float64[:, ::1]", "float64[::1]", "float64[::1]", "float64[::1]")
def _products(rows: Any, vector: Any, sums: Any, result: Any) -> None:
    whole = vector.size // LANES * LANES
    for row in range(len(rows)):
        sums[:] = 0.0
        for begin in range(0, whole, LANES):
            for lane in range(LANES):
                sums[lane] += rows[row, begin + lane] * vector[begin + lane]
        for place in range(whole, vector.size):
            sums[place - whole] += rows[row, place] * vector[place]
        total = 0.0
        for lane in range(LANES):
            total += sums[lane]
        result[row] = total


def row_products(rows: Matrix, vector: Matrix) -> Matrix:
    """Compute rows @ vector: float64 [R] from contiguous [R, n] and [n]."""
    result = np.empty(len(rows))
    _products(rows, vector, np.empty(LANES), result)
    return result


def dot(left: ArrayLike, right: ArrayLike) -> float:
    """Return the sum of the products of the elements of two arrays of one size, row by row."""
    one, other = (np.ascontiguousarray(array, np.float64).reshape(1, -1) for array in (left, right))
    return float(row_products(one, other[0])[0])
