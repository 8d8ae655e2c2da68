"""Whole networks on other tasks than addition: generated problems, a data file, programs in a sandbox, episodes."""

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode.engine.torch_engine import TorchEngine
from grailnode.environments import registry
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.run import creation, requirements
from grailnode.run.rules import Rules
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import PluginLimits, PluginSandbox
from protocol import environments, paths
from protocol.encoding import REWARD_UNIT
from protocol.environments import Environment, Problem
from protocol.environments.base import ProgramLimits
from protocol.errors import MalformedError
from protocol.rollout.batch import EpisodeRollout, Group
from roles.miner.produce import HonestProducer
from roles.policy.assignment import Task
from roles.ports import StoreError
from tests.support.adversaries.false_episodes import CHEATS
from tests.support.builders.dice import Dice
from tests.support.builders.plugins import install_module
from tests.support.builders.policies import write_speaking_policy
from tests.support.builders.recipes import demo_rules
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import judged_groups, run_nodes, summaries, verdicts


class FullReward:
    """An environment that rewards everything with 1, for a miner that lies about its rewards."""

    def __init__(self, honest: Environment) -> None:
        self._honest = honest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def reward(self, problem: Problem, completion: str) -> float:
        return 1.0


def full_reward_producer(task: Task, engine: TorchEngine) -> HonestProducer:
    """Return a producer of honest rollouts that claim full reward for everything."""
    environment: Any = FullReward(task.environment)
    return HonestProducer(replace(task, environment=environment), engine)


def texts(network: Network, group: Group) -> list[str]:
    stops = network.run.sampling.stops
    return [
        network.policy.tokenizer.decode(tuple(token for token in rollout.tokens if token not in stops))
        for rollout in group.rollouts
    ]


async def check_rewards(network: Network) -> list[tuple[str, float]]:
    """Check that honest groups are accepted with exact rewards, and that false rewards are rejected.

    Returns:
        (text, reward) pairs of the honest groups.
    """
    task = network.task(network.node("checker"))
    pairs: list[tuple[str, float]] = []
    for group, judgement in await judged_groups(network, "miner-1", range(6)):
        assert judgement.accepted, judgement.reason
        opening = network.run.schedule.opening(group.window)
        randomness = await network.node("checker").beacon.randomness(opening)
        assignment = task.assign(group.window, randomness, group.miner, group.index)
        assert assignment.prompt == group.prompt_tokens
        rewards = tuple(task.environment.reward(assignment.problem, text) for text in texts(network, group))
        assert tuple(round(reward * REWARD_UNIT) for reward in rewards) == judgement.rewards
        pairs += zip(texts(network, group), rewards, strict=True)
    for group, judgement in await judged_groups(network, "liar", range(6)):
        assert all(rollout.reward == REWARD_UNIT for rollout in group.rollouts)
        assert judgement.reason == "wrong-reward"
    return pairs


async def run_with_liar(network: Network, window: int, miners: int = 1) -> None:
    """Run the nodes, and a miner that claims full reward for everything, until a window."""
    async with run_nodes(network, miners=miners) as nursery:
        nursery.start_soon(network.run_miner, "liar", 2, full_reward_producer)
        await network.until_window(window)


async def test_a_mixture() -> None:
    mixture = "addition=600000,countdown=400000"
    network = Network(demo_rules(environment=mixture, groups=4, group_size=4, max_tokens=8, evaluation_problems=6))
    await run_with_liar(network, 6)
    assert {reward for _, reward in await check_rewards(network)} >= {0.0, 1.0}
    prompts = [
        network.policy.tokenizer.decode(group.prompt_tokens)
        for group, _ in await judged_groups(network, "miner-1", range(6))
    ]
    assert {">" in prompt for prompt in prompts} == {True, False}  # problems of countdown, and of addition
    entries = await summaries(network, "validator-0", range(6))
    for evaluation in (entry.evaluation for entry in entries if entry.evaluation is not None):
        assert {stratum.name: stratum.problems for stratum in evaluation.strata} == {"addition": 3, "countdown": 3}


ANSWERS = ("3", "4", "5")
COMPLETIONS = tuple(f"{think}<solution>{answer}</solution>" for answer in ANSWERS for think in ("", "<think>a</think>"))
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}<assistant>"
QUESTIONS = tuple((f"What is {number} and {other}?", number + other) for number in range(4) for other in range(5))


@pytest.fixture
def mathematics(tmp_path: Path) -> Rules:
    """Return the rules of a run on a tiny data file, and write a policy that answers with solutions."""
    lines = [
        json.dumps({"question": question, "answer": f"#### {answer}", "level": answer % 2})
        for question, answer in QUESTIONS
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(lines))
    write_speaking_policy(tmp_path / "policy", COMPLETIONS, CHAT_TEMPLATE)
    rules = demo_rules(environment="math", data=data, groups=2, group_size=8, max_tokens=1)
    return rules.changed(chat=True, system_prompt="Think.", evaluation_samples=4, pass_at=2)


async def test_problems_of_a_data_file_as_conversations(mathematics: Rules, tmp_path: Path) -> None:
    network = Network(mathematics, policy=tmp_path / "policy")
    await run_with_liar(network, 6, miners=2)
    pairs = await check_rewards(network)
    group, _ = (await judged_groups(network, "miner-1", range(6)))[0]
    prompt = network.policy.tokenizer.decode(group.prompt_tokens)
    assert prompt.startswith("<system>Think.\n<user>What is ")
    assert prompt.endswith("alone.\n<assistant>")
    assert network.events("trainer/training", "step")
    rewards = {reward for text, reward in pairs if text in COMPLETIONS}
    assert {0.2, 0.3, 1.0} <= rewards  # the right format; with thinking; and with the right answer
    dataset = environments.dataset("math", mathematics.data.read_bytes() if mathematics.data else b"")
    levels = Counter(problem.stratum for problem in dataset.held_out_problems)
    entries = await summaries(network, "validator-0", range(6))
    evaluations = [entry.evaluation for entry in entries if entry.evaluation is not None]
    for evaluation in evaluations:
        assert {stratum.name: stratum.problems for stratum in evaluation.strata} == levels
        assert all(len(stratum.right) == 5 for stratum in evaluation.strata)
    assert any(evaluation.pass_at(2) > evaluation.pass_at(1) for evaluation in evaluations)


async def test_the_data_file_is_fetched_like_the_model_and_its_digest_is_checked(
    mathematics: Rules, tmp_path: Path
) -> None:
    network = Network(mathematics, policy=tmp_path / "policy")
    run, store, trainer = network.run, network.store, key("trainer").public
    files = requirements.files_to_publish(run, mathematics.data)
    await creation.publish_files(store, trainer, files)
    assert await creation.fetch_data(network.node("miner-1"), tmp_path / "data") == network.data
    assert run.data is not None
    path = paths.file(trainer, run.data.digest)
    await store.delete(path)
    # The local file is still there, and is checked again.
    assert await creation.fetch_data(network.node("miner-1"), tmp_path / "data") == network.data
    local_file = tmp_path / "data" / run.data.name
    local_file.write_bytes(local_file.read_bytes().replace(b"4", b"5"))
    assert network.data is not None
    await store.put(path, network.data.replace(b"4", b"5"))
    with pytest.raises(StoreError, match=r"^data\.jsonl: not the file that the run names, as storage shows it now$"):
        await creation.fetch_data(network.node("miner-1"), tmp_path / "data")


async def test_a_data_file_without_problems_is_refused_in_one_line(mathematics: Rules, tmp_path: Path) -> None:
    network = Network(mathematics, policy=tmp_path / "policy")
    network.data = b'{"question": "a"}'
    with pytest.raises(MalformedError, match=r"^the run's data file: line 1: no 'answer'$"):
        network.task(network.node("miner"))


@pytest.fixture(scope="module")
def strict() -> BubblewrapSandbox:
    """Return a real sandbox with short time limits."""
    return open_sandbox(ProgramLimits(cpu_seconds=1, wall_seconds=8.0))


RIGHT = "<think>a</think><solution>def f(x): return 1000 + x</solution>"


def attacks(target: Path, port: int) -> Sequence[str]:
    """Return hostile programs; the first one passes its tests only if one of its attacks succeeds."""
    return (
        f"""
import os, signal, socket
def bomb():
    while True: os.fork()
def succeeds(attempt):
    try: attempt()
    except OSError: return False
    return True
assert any([
    succeeds(bomb),
    succeeds(lambda: open({str(target)!r}, 'w').write('was here')),
    succeeds(lambda: socket.create_connection(('127.0.0.1', {port}), 1)),
])
os.kill(os.getppid(), signal.SIGKILL)
def f(x): return 1000 + x
""",
        "blocks = []\nwhile True: blocks.append(bytearray(1 << 24))",
        "while True: pass",
    )


async def test_hostile_programs_are_judged_without_harm_and_false_rewards_are_ignored(
    strict: BubblewrapSandbox, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    tests = [f"assert f({number}) == 1000 + {number}" for number in range(3)]
    lines = [
        json.dumps({"text": f"Task {number}: add 1000.", "code": "def f(x): return x + 1000", "test_list": tests})
        for number in range(30)
    ]
    data = tmp_path / "tasks.jsonl"
    data.write_text("\n".join(lines))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        hostile = [f"<solution>{text}</solution>" for text in attacks(target, listener.getsockname()[1])]
        write_speaking_policy(tmp_path / "policy", [RIGHT, *hostile])
        rules = demo_rules(environment=f"code-{OWN}", data=data, groups=1, group_size=8, max_tokens=1)
        rewards: dict[str, set[float]] = {}
        network = Network(rules, policy=tmp_path / "policy", sandbox=strict)
        async with run_nodes(network, miners=0) as nursery:
            nursery.start_soon(network.run_miner, "liar", 1, full_reward_producer)
            last = 3  # and later ones, until the policy has generated each of its completions
            while not rewards.keys() >= {RIGHT, *hostile} and last < 20:
                await network.until_window(last)
                for group, judgement in await judged_groups(network, "liar", range(last)):
                    assert judgement.accepted, judgement.reason
                    assert all(rollout.reward == REWARD_UNIT for rollout in group.rollouts)
                    for text, reward in zip(texts(network, group), judgement.rewards, strict=True):
                        rewards.setdefault(text, set()).add(reward / REWARD_UNIT)
                last += 1
        assert any(event["used"] for event in network.events("trainer/download", "collected"))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not target.exists()
    assert rewards.pop(RIGHT) == {1.0}
    assert {text: rewards.pop(text) for text in hostile if text in rewards} == {text: {0.2} for text in hostile}
    assert all(values == {0.0} for values in rewards.values())


def register(monkeypatch: pytest.MonkeyPatch, environment: Any) -> None:
    """Let runs name an environment of this test."""
    monkeypatch.setitem(environments._GENERATED, environment.name, environment)
    monkeypatch.setattr(environments, "names", (*environments.names, environment.name))
    is_built_in = registry.is_built_in
    monkeypatch.setattr(registry, "is_built_in", lambda name: name == environment.name or is_built_in(name))


HANGING = """
class Task:
    exact = True
    held_out_size = 4
    def __init__(self, config):
        pass
    def problem(self, seed):
        number = 10 + seed[0] % 40
        return {"prompt": f"{number}+{number}=", "reference": number}
    def held_out_problem(self, index):
        return {"prompt": f"{51 + index}+10=", "reference": 1}
    def reward(self, problem, completion):
        while problem["reference"] % 2:
            pass
        return float(completion == str(2 * problem["reference"]))
"""


async def test_a_plugin_that_hangs_breaks_the_judging_of_its_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install_module("hanging", HANGING, tmp_path)
    limits = PluginLimits(call_seconds=0.5)
    plugin = PluginEnvironment("hanging", PluginSandbox(open_sandbox(), [site], "hanging", b"{}", limits))
    register(monkeypatch, plugin)
    network = Network(demo_rules(environment="hanging", groups=2, group_size=4, max_tokens=8, evaluation_problems=1))
    await run_with_liar(network, 5)
    plugin.close()
    task = network.task(network.node("checker"))
    reasons: dict[bool, set[str]] = {True: set(), False: set()}
    for name in ("liar", "miner-1"):
        for group, judgement in await judged_groups(network, name, range(5)):
            hangs = int(network.policy.tokenizer.decode(group.prompt_tokens)[:2]) % 2 == 1
            reasons[hangs].add(judgement.reason)
            assert not (hangs and (judgement.rejected or judgement.accepted))
    assert task.environment is plugin
    assert reasons[True] == {"unreproduced"}
    assert reasons[False] & {"", "wrong-reward"}
    assert network.events("validator-0", "not-evaluated")
    entries = await summaries(network, "validator-0", range(5))
    assert entries and not any(entry.evaluation for entry in entries)


# Episodes: honest miners are accepted, and false episodes refused at once


EPISODES = {"turns": 6, "turn_tokens": 3, "reply_tokens": 8, "max_tokens": 8}


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> Dice:
    """Return the environment of dice, which is registered."""
    environment = Dice()
    register(monkeypatch, environment)
    return environment


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
