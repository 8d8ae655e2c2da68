"""The arithmetic of a round, compared with numpy, where each operation is rounded by itself; inner products; and ranks
of grid values, compared with exact fractions: each rank is a visible value, and each such value has one.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from protocol.errors import ContributionError
from protocol.kernels.inner_products import LANES, dot, row_products
from protocol.kernels.jit import kernel
from protocol.pseudogradient import PULSELOCO_GRID, SquaredNorm, streams_of
from protocol.pseudogradient.arithmetic import pseudo_gradient
from protocol.pseudogradient.visibility import S, borders, grid_shift, rank_of, value_at

F = np.float32


def numbers(seed: int, size: int = 10_007) -> np.ndarray:
    """Return float32 numbers of many magnitudes, with subnormal ones."""
    random = np.random.default_rng(seed)
    return np.asarray(random.standard_normal(size) * np.exp2(random.uniform(-145, 20, size)), F)


def test_an_update_is_rounded_three_times() -> None:
    base, local, feedback = numbers(1), numbers(2), numbers(3)
    expected = F(0.95) * feedback + (base - local)
    assert np.array_equal(pseudo_gradient(base, local, feedback, 0.95), expected)


def test_an_outer_step_to_infinity_is_refused() -> None:
    base = np.full(5, 3e38, F)
    with pytest.raises(ContributionError, match="not finite"):
        PULSELOCO_GRID.step(base, np.zeros(5, F), -base)


def test_a_norm_has_eight_lanes() -> None:
    values = numbers(4, 1003)
    lanes = [0.0] * 8
    for index, value in enumerate(values.tolist()):
        lanes[index % 8] += value * value
    own = 0.0
    for lane in lanes:
        own += lane
    norm = SquaredNorm()
    norm.add(values)
    norm.add(values)
    assert norm.value == own + own
    assert math.isclose(own, float((values.astype(np.float64) ** 2).sum()))


def test_streams_divide_the_layers() -> None:
    names = ["model.embed.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.up.weight" for layer in range(6)]
    assert streams_of(names, 3) == (
        ("model.embed.weight", "model.layers.0.up.weight", "model.layers.1.up.weight"),
        ("model.layers.2.up.weight", "model.layers.3.up.weight"),
        ("lm_head.weight", "model.layers.4.up.weight", "model.layers.5.up.weight", "model.norm.weight"),
    )


# Ranks of grid values


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


def magnitude(bits: int) -> Fraction:
    """Return the number with a float32 bit pattern."""
    return Fraction(float(np.uint32(bits).view(np.float32)))


def rounded(value: Fraction, view: int) -> bool:
    """Return whether a number rounds to the BF16 bit pattern `view` (a magnitude), in exact arithmetic."""
    low = -magnitude(0x8000) if view == 0 else magnitude((view << 16) - 0x8000)
    high = magnitude((view << 16) + 0x8000)
    return low <= value <= high if view % 2 == 0 else low < value < high


def test_least_steps_are_exact() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 0x7F000000, 400).astype(np.uint32)
    special = [0, 1, 0x8000, 0x8001, 0x18000, 0x3F800000, 0x3F7FFFFF, 0x3F808000, 0x3F818000, 0x3F7F8000, 0x00800000]
    bits = np.concatenate((bits, np.array(special, np.uint32)))
    run = kernel(_borders)
    for fraction, floor in [(0, 8), (3, 11), (3, 127), (8, 16)]:
        least = np.zeros((bits.size, 2), np.int64)
        run(bits, np.uint32(floor), np.uint32(fraction), least)
        for pattern, (out, inner) in zip(bits.tolist(), least.tolist(), strict=True):
            step = Fraction(2) ** (max(pattern >> 23, floor) - 134 - fraction)
            weight, view = magnitude(pattern), (pattern + 0x7FFF + (pattern >> 16 & 1)) >> 16
            assert not rounded(weight + out * step, view)
            assert rounded(weight + (out - 1) * step, view)
            assert not rounded(weight - inner * step, view)
            assert rounded(weight - (inner - 1) * step, view)


@pytest.mark.parametrize(("least_out", "least_in"), [(1, 1), (1, 9), (9, 1), (4, 4), (3, 5), (1000, 7)])
def test_ranks_number_the_visible_values_in_ascending_order(least_out: int, least_in: int) -> None:
    out = np.zeros((3000, 3), np.int64)
    kernel(_ranks)(least_out, least_in, len(out), out)
    assert out[:, 2].tolist() == list(range(3000))
    assert (np.diff(out[:, 0]) >= 0).all()
    assert len({(steps, direction) for steps, direction, _ in out.tolist()}) == 3000
    assert all(steps >= (least_out if outwards else least_in) for steps, outwards, _ in out.tolist())


# Inner products have the order of additions that their module states, and so the same bits everywhere


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
