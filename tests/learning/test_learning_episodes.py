"""The packaged policies learn from episodes, with the learning rates of the demo, and from a mixture of two tasks."""

import statistics
from pathlib import Path

import pytest

from grailnode.demo.demo_network import DemoSettings
from protocol import environments
from protocol.environments.base import Problem
from protocol.environments.mixture import Mixture
from protocol.environments.seeded_rng import DrawnProblems, SeededRng
from tests.support.simulation.learning import Setup, Simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "windows", "least", "most"), [("wordle", 24, 0.06, 0.075), ("calculator", 14, 0.2, 0.25)]
)
def test_the_reward_of_the_demo_rises(environment: str, windows: int, least: float, most: float) -> None:
    demo = DemoSettings(windows, 0, Path(), keep=False, command="", environment=environment)
    rate = demo.recipe.trainer.learning_rate
    setup = Setup(str(demo.policy), environment=environment, learning_rate=rate, groups=24, held_out=1)
    simulation = Simulation(setup)
    rewards = [simulation.window(number)["reward"] for number in range(windows)]
    assert statistics.fmean(rewards[:5]) < least
    assert statistics.fmean(rewards[-5:]) > most


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
