"""Ranks of grid values, compared with exact fractions: each rank is a visible value, and each such value has one."""

from fractions import Fraction

import numpy as np
import pytest

from protocol.kernels.jit import kernel
from protocol.pseudogradient.visibility import S, borders, grid_shift, rank_of, value_at


def _borders(weights, floor, fraction, out):
    for i in range(weights.size):
        out[i, 0], out[i, 1] = borders(weights[i], grid_shift(weights[i], floor, fraction))
    return 0


def _ranks(least_out, least_in, count, out):
    for rank in range(count):
        steps, outwards = value_at(S(rank), S(least_out), S(least_in))
        out[rank, 0], out[rank, 1] = steps, outwards
        out[rank, 2] = rank_of(steps, outwards, S(least_out), S(least_in))
    return 0


def number(bits: int) -> Fraction:
    """Return the number with a float32 bit pattern."""
    return Fraction(float(np.uint32(bits).view(np.float32)))


def rounded(value: Fraction, view: int) -> bool:
    """Return whether a number rounds to the BF16 bit pattern `view` (a magnitude), in exact arithmetic."""
    low = -number(0x8000) if view == 0 else number((view << 16) - 0x8000)
    high = number((view << 16) + 0x8000)
    return low <= value <= high if view % 2 == 0 else low < value < high


def test_least_steps_are_exact() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 0x7F000000, 400).astype(np.uint32)
    special = [0, 1, 0x8000, 0x8001, 0x18000, 0x3F800000, 0x3F7FFFFF, 0x3F808000, 0x3F818000, 0x3F7F8000, 0x00800000]
    bits = np.concatenate((bits, np.array(special, np.uint32)))
    run = kernel("uint32[::1]", "uint32", "uint32", "int64[:, ::1]")(_borders)
    for fraction, floor in [(0, 8), (3, 11), (3, 127), (8, 16)]:
        least = np.zeros((bits.size, 2), np.int64)
        run(bits, np.uint32(floor), np.uint32(fraction), least)
        for pattern, (out, inner) in zip(bits.tolist(), least.tolist(), strict=True):
            step = Fraction(2) ** (max(pattern >> 23, floor) - 134 - fraction)
            weight, view = number(pattern), (pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16
            assert not rounded(weight + out * step, view)
            assert rounded(weight + (out - 1) * step, view)
            assert not rounded(weight - inner * step, view)
            assert rounded(weight - (inner - 1) * step, view)


@pytest.mark.parametrize(("least_out", "least_in"), [(1, 1), (1, 9), (9, 1), (4, 4), (3, 5), (1000, 7)])
def test_ranks_number_the_visible_values_in_ascending_order(least_out: int, least_in: int) -> None:
    out = np.zeros((3000, 3), np.int64)
    kernel("int64", "int64", "int64", "int64[:, ::1]")(_ranks)(least_out, least_in, len(out), out)
    assert out[:, 2].tolist() == list(range(3000))
    assert (np.diff(out[:, 0]) >= 0).all()
    assert len({(steps, direction) for steps, direction, _ in out.tolist()}) == 3000
    assert all(steps >= (least_out if outwards else least_in) for steps, outwards, _ in out.tolist())
