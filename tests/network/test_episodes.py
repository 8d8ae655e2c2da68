"""Whole networks whose rollouts are episodes: honest miners are accepted, and false episodes refused at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.environments.plugin_environment import PluginEnvironment
from protocol import environments
from protocol.rollout.batch import EpisodeRollout
from tests.support.adversaries.false_episodes import CHEATS
from tests.support.builders.dice import Dice
from tests.support.builders.plugins import files_of_page, install
from tests.support.builders.recipes import demo_rules
from tests.support.builders.tasks import open_sandbox
from tests.support.simulation.network import Network
from tests.support.simulation.network_runs import judged_groups, run_nodes, summaries, verdicts

EPISODES = {"turns": 6, "turn_tokens": 3, "reply_tokens": 8, "max_tokens": 8}


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    """Return the environment of dice, which is registered."""
    environment = Dice()
    monkeypatch.setitem(environments._GENERATED, "dice", environment)
    monkeypatch.setattr(environments, "names", (*environments.names, "dice"))
    return environment


@pytest.fixture
def higher_lower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PluginEnvironment]:
    """Return the guide's plug-in from its wheel, which is registered."""
    plugin = PluginEnvironment.open(open_sandbox(), [install(files_of_page(), tmp_path)], "higher-lower", b"{}")
    monkeypatch.setitem(environments._GENERATED, plugin.name, plugin)
    monkeypatch.setattr(environments, "names", (*environments.names, plugin.name))
    yield plugin
    plugin.close()


async def test_a_plugin_steps_episodes_of_both_roles_and_a_forged_reply_is_refused(
    higher_lower: PluginEnvironment,
) -> None:
    network = Network(demo_rules(environment=higher_lower.name, groups=2, group_size=4, **EPISODES))
    forger, reason = CHEATS["forged-reply"]
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_miner, "forger", 2, forger)
        await network.until_window(4)
    honest = await judged_groups(network, "miner-1", range(4))
    assert {judgement.reason for _, judgement in honest} == {""}
    turns = {len(rollout.turns) for group, _ in honest for rollout in group.rollouts if hasattr(rollout, "turns")}
    assert max(turns) >= 3
    assert {judgement.reason for _, judgement in await judged_groups(network, "forger", range(4))} == {reason.value}
    assert any(entry.evaluation for entry in await summaries(network, "validator-0", range(4)))


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
