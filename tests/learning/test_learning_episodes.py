"""The packaged policies learn from episodes, with the learning rates of the demo."""

import statistics
from pathlib import Path

import pytest

from grailnode.demo.demo_network import DemoSettings
from tests.support.simulation.learning import Setup, Simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "windows", "least", "most"), [("wordle", 40, 0.06, 0.09), ("calculator", 14, 0.2, 0.25)]
)
def test_the_reward_of_the_demo_rises(environment: str, windows: int, least: float, most: float) -> None:
    demo = DemoSettings(windows, 0, Path(), keep=False, command="", environment=environment)
    rate = demo.recipe.trainer.learning_rate
    setup = Setup(str(demo.policy), environment=environment, learning_rate=rate, groups=24, held_out=1)
    simulation = Simulation(setup)
    rewards = [simulation.window(number)["reward"] for number in range(windows)]
    assert statistics.fmean(rewards[:5]) < least
    assert statistics.fmean(rewards[-5:]) > most
