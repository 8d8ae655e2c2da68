"""The arithmetic of a round, compared with numpy, where each operation is rounded by itself."""

import math

import numpy as np
import pytest

from protocol import pseudogradient
from protocol.errors import ContributionError
from protocol.pseudogradient import DILOCO, PULSELOCO_GRID, SPARSELOCO, SquaredNorm, streams_of
from protocol.pseudogradient.arithmetic import pseudo_gradient

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
    assert np.array_equal(pseudogradient.mean_of(parts, weights), total / F(4))


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
