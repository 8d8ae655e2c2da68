"""The packaged policy, which adds, learns two tasks at once: each group's seed draws one of them."""

import statistics

import pytest

from protocol import environments
from protocol.environments.base import Problem
from protocol.environments.mixture import Mixture
from protocol.environments.seeded_rng import DrawnProblems, SeededRng
from tests.support.simulation.learning import Setup, Simulation


class PaddedSums(DrawnProblems):
    """Sums of a number of two digits and one of a digit behind a zero, which the packaged policy has not seen."""

    name = "padded-sums"

    def draw(self, rng: SeededRng) -> Problem:
        a, b = rng.between(10, 99), rng.between(1, 9)
        return Problem(f"{a}+0{b}=", str(a + b))

    def reward(self, problem: Problem, completion: str) -> float:
        return float(completion == problem.reference)


@pytest.mark.slow
def test_every_member_of_a_mixture_is_learned() -> None:
    mixture = Mixture([(400_000, environments.get("addition")), (600_000, PaddedSums())])
    simulation = Simulation(Setup(windows=30, learning_rate=2e-5, held_out=128), environment=mixture)
    simulation.serve(0)
    first = simulation.rewards_by_stratum()
    for window in range(simulation.setup.windows):
        simulation.window(window)
    last = simulation.rewards_by_stratum()
    assert first.keys() == last.keys() == {"addition", "padded-sums"}
    for name, rewards in first.items():
        assert statistics.fmean(last[name]) > statistics.fmean(rewards) + 0.1
