"""Whole networks whose rollouts are episodes: honest miners are accepted, and false episodes refused at once."""

import pytest

from protocol import environments
from protocol.rollout.batch import EpisodeRollout
from tests.support.adversaries.false_episodes import CHEATS
from tests.support.builders.dice import Dice
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network
from tests.support.simulation.network_runs import judged_groups, run_nodes, summaries, verdicts
from tests.support.simulation.virtual_clock import simulated

EPISODES = {"turns": 6, "turn_tokens": 3, "reply_tokens": 8, "max_tokens": 8}


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    """Return the environment of dice, which is registered."""
    environment = Dice()
    monkeypatch.setitem(environments._GENERATED, "dice", environment)
    monkeypatch.setattr(environments, "names", (*environments.names, "dice"))
    return environment


@simulated
async def test_honest_episodes_are_trained_on_and_seven_cheats_are_refused_in_their_first_window(dice: Dice) -> None:
    network = Network(demo_rules(environment="dice", groups=2, group_size=4, **EPISODES))
    async with run_nodes(network, miners=2) as nursery:
        for name, (producer, _) in CHEATS.items():
            nursery.start_soon(network.run_miner, name, 2, producer)
        await network.until_window(5)
    turns = set()
    for group, judgement in await judged_groups(network, "miner-1", range(5)):
        assert judgement.accepted, judgement.reason
        for rollout in group.rollouts:
            assert isinstance(rollout, EpisodeRollout)
            turns.add(len(rollout.turns))
    assert turns >= {1, 2, 3}
    for name, (_, reason) in CHEATS.items():
        of_windows = await verdicts(network, name, range(5))
        first = of_windows[min(of_windows)]
        reasons = {judgement.reason for judgement in first.judgements}
        assert reason.value in reasons, (name, reasons)
        assert reasons <= {reason.value, "wrong-stop", ""}, name
    assert network.events("trainer/training", "step")
    evaluations = [entry.evaluation for entry in await summaries(network, "validator-0", range(5))]
    assert any(evaluation is not None and evaluation.strata[0].problems == 16 for evaluation in evaluations)
