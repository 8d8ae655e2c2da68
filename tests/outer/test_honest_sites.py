"""Sites that learn with AdamW from noisy gradients: honest ones are never refused, and a poisoned one moves little."""

from functools import cache

import numpy as np
import pytest

from tests.outer.methods import METHODS
from tests.support.simulation.noisy_sites import SIZE, Attack, Vector, weighed_rounds


@pytest.mark.parametrize(
    ("method", "steps"), [("dense", [1, 1, 1, 1]), ("grid", [1, 8, 8, 8]), ("chunked", [2, 2, 2, 2])]
)
def test_honest_sites_with_noisy_gradients_count_in_every_round(method: str, steps: list[int]) -> None:
    """Adam's moments make the noise of consecutive contributions alike, which looks like a drift."""
    rules = METHODS[method].model_copy(update={"local_steps": max(steps)})
    weightings, _ = weighed_rounds(rules, 40, steps=steps, noise=10.0)
    factors = np.array([weighting.factors for weighting in weightings])
    assert factors.min() > 0
    assert factors.mean() > 0.75


@pytest.mark.parametrize("method", ["dense", "chunked"])
def test_a_site_that_takes_one_step_of_eight_costs_nobody_much(method: str) -> None:
    rules = METHODS[method].model_copy(update={"local_steps": 8})
    weightings, _ = weighed_rounds(rules, 60, steps=[1, 8, 8, 8], noise=10.0)
    factors = np.array([weighting.factors for weighting in weightings]).mean(axis=0)
    assert factors.min() > 0.85
    assert factors.mean() > 0.95


def _fixed(seed: int) -> Vector:
    direction = np.random.default_rng(seed).standard_normal(SIZE)
    unit: Vector = (direction / np.linalg.norm(direction)).astype(np.float32)
    return unit


DIRECTION = _fixed(4)


def _turned(update: Vector, sine: float) -> Vector:
    turned: Vector = ((1 - sine**2) ** 0.5 * update + sine * np.linalg.norm(update) * DIRECTION).astype(np.float32)
    return turned


ATTACKS: dict[str, Attack] = {
    "times 1000 towards it": lambda own, _: 1000 * _turned(own, 0.9),
    "half drift": lambda own, _: _turned(own, 0.5),
    "drift that grows": lambda own, number: _turned(own, min(0.95, 0.01 * number)),
}


@cache
def _end(rounds: int, attack: str = "") -> Vector:
    rules = METHODS["dense"].model_copy(update={"local_steps": 8})
    return weighed_rounds(rules, rounds, steps=[8] * 4, noise=3.0, attack=ATTACKS.get(attack))[1]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_drift_moves_the_weights_by_a_fourteenth_of_the_way_at_most(attack: str) -> None:
    clean, poisoned = (end - _end(0) for end in (_end(60), _end(60, attack)))
    assert abs(poisoned @ DIRECTION) < 0.07 * np.linalg.norm(clean)
