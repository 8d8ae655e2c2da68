"""Inner products have the order of additions that their module states, and so the same bits everywhere."""

import numpy as np
import pytest

from protocol.kernels.inner_products import LANES, dot, row_products


def in_order(left: list[float], right: list[float]) -> float:
    sums, total = [0.0] * LANES, 0.0
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        sums[place % LANES] += one * other
    for own in sums:
        total += own
    return total


@pytest.mark.parametrize("size", [0, 1, LANES - 1, LANES, 3 * LANES + 7, 5000])
def test_each_product_is_added_to_its_partial_sum(size: int) -> None:
    rows = np.random.default_rng(size).uniform(-1, 1, (3, size))
    expected = [[in_order(left, right) for right in rows.tolist()] for left in rows.tolist()]
    assert [row_products(rows, row).tolist() for row in rows] == expected
    assert dot(rows[0], rows[2]) == expected[0][2]


def test_arrays_of_any_layout_are_multiplied_row_by_row() -> None:
    numbers = np.random.default_rng(1).uniform(-1, 1, (9, 11))
    mask = np.tri(11, 9, dtype=bool)
    assert dot(numbers.T, mask) == in_order(numbers.T.flatten().tolist(), mask.flatten().tolist())
