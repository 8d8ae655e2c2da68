"""SIMD operations, compared with plain Python."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from protocol.kernels import simd
from protocol.kernels.jit import kernel


def _places(nth_one: Any) -> Any:
    def places(mask: Any, count: Any, out: Any) -> Any:
        for number in range(count):
            out[number] = nth_one(mask, np.uint64(number))
        return 0

    return kernel("uint64", "int64", "uint64[::1]")(places)


@pytest.mark.parametrize("name", ["nth_one", "_nth_one_by_halves"])
def test_places_of_the_ones_of_a_mask(name: str) -> None:
    random, places = np.random.default_rng(0), _places(getattr(simd, name))
    masks = [1, 1 << 63, (1 << 64) - 1, *random.integers(0, 1 << 64, 50, np.uint64).tolist()]
    masks += [mask & other for mask, other in pairwise(masks)]
    for mask in masks:
        ones = [place for place in range(64) if mask >> place & 1]
        out = np.zeros(64, np.uint64)
        places(np.uint64(mask), len(ones), out)
        assert out[: len(ones)].tolist() == ones
