"""The arithmetic of a round, compared with numpy, where each operation is rounded by itself; and ranks of grid values,
compared with exact fractions: each rank is a visible value, and each such value has one.
"""

import math
from fractions import Fraction

import numpy as np
import pytest

from protocol.errors import ContributionError
from protocol.kernels.jit import kernel
from protocol.pseudogradient import DILOCO, PULSELOCO_GRID, SPARSELOCO, SquaredNorm, streams_of
from protocol.pseudogradient.arithmetic import add_contribution, divide, pseudo_gradient
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


def test_a_mean_is_summed_in_order() -> None:
    parts, weights = [numbers(seed) for seed in range(4)], [1.0, 0.3, 1.0, 0.7]
    total = np.zeros_like(parts[0])
    for values, weight in zip(parts, weights, strict=True):
        total = total + F(weight) * values
    mean = np.zeros_like(parts[0])
    for values, weight in zip(parts, weights, strict=True):
        add_contribution(mean, values, weight)
    divide(mean, 4)
    assert np.array_equal(mean, total / F(4))


def test_outer_steps_fuse_no_operations() -> None:
    base, momentum, mean = numbers(1), numbers(2), numbers(3)
    new_momentum = F(0.9) * momentum + mean
    expected = base - F(0.7) * (F(0.9) * new_momentum + mean)
    plain = base - F(1.0) * mean
    first, second, state = base.copy(), base.copy(), momentum.copy()
    DILOCO.step(first, state, mean)
    SPARSELOCO.step(second, momentum, mean)
    assert np.array_equal(first, expected)
    assert np.array_equal(state, new_momentum)
    assert np.array_equal(second, plain)


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
    run = kernel("uint32[::1]", "uint32", "uint32", "int64[:, ::1]")(_borders)
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
    kernel("int64", "int64", "int64", "int64[:, ::1]")(_ranks)(least_out, least_in, len(out), out)
    assert out[:, 2].tolist() == list(range(3000))
    assert (np.diff(out[:, 0]) >= 0).all()
    assert len({(steps, direction) for steps, direction, _ in out.tolist()}) == 3000
    assert all(steps >= (least_out if outwards else least_in) for steps, outwards, _ in out.tolist())
