"""Whole networks on other tasks than addition: drawn ones, problems of a data file, and programs in the real sandbox."""

import itertools
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from grailnode.engine.torch_engine import TorchEngine
from grailnode.run import creation, requirements
from grailnode.run.creation import Choices
from grailnode.sandbox import BubblewrapSandbox
from protocol import environments, limits, paths
from protocol.environments import Environment, Problem
from protocol.environments.base import ProgramLimits, SandboxError
from protocol.errors import MalformedError
from protocol.identity.signing import open_signed
from protocol.judging.ledger import Summary
from protocol.judging.verdict import Judgement
from protocol.rollout.batch import Commitment, Group, open_group
from roles.miner.produce import HonestProducer
from roles.policy.assignment import Task
from roles.ports import StoreError
from tests.network.test_network import running, simulate, verdicts
from tests.sandbox.conftest import OWN
from tests.support.builders.phrase_policies import write_speaking_policy
from tests.support.simulation.network import Network, key


@dataclass(frozen=True)
class Generous:
    """An environment that pays 1 for anything: what a miner that lies about its rewards judges by."""

    true: Environment

    @property
    def name(self) -> str:
        return self.true.name

    @property
    def exact(self) -> bool:
        return self.true.exact

    @property
    def held_out_size(self) -> int | None:
        return self.true.held_out_size

    def problem(self, seed: bytes) -> Problem:
        return self.true.problem(seed)

    def held_out_problem(self, index: int) -> Problem:
        return self.true.held_out_problem(index)

    def reward(self, problem: Problem, completion: str) -> float:
        return 1.0


def boasting(task: Task, engine: TorchEngine) -> HonestProducer:
    """A miner that does what is due, and claims full reward for all of it."""
    return HonestProducer(replace(task, environment=Generous(task.environment)), engine)


async def judged(network: Network, miner: str, windows: range) -> list[tuple[Group, Judgement]]:
    """A miner's groups as they lie in storage, with the first validator's judgements on them."""
    found = []
    public = key(miner).public
    for window, verdict in (await verdicts(network, miner, windows)).items():
        data = await network.store.get(paths.commitment(public, window), limits.MAX_COMMITMENT_BYTES)
        commitment = open_signed(data, Commitment, [public]).record
        batch = await network.store.get(paths.batch(public, window, commitment.batch), limits.MAX_BATCH_BYTES)
        for judgement in verdict.judgements:
            offset, size = commitment.extent(judgement.index)
            found.append((open_group(batch[offset : offset + size], commitment, judgement.index), judgement))
    assert found
    return found


def texts(network: Network, group: Group) -> list[str]:
    """What a group's completions say."""
    eos = network.run.sampling.eos
    return [
        network.policy.tokenizer.decode(tuple(token for token in rollout.tokens if token != eos))
        for rollout in group.rollouts
    ]


async def evaluated(network: Network) -> set[int]:
    """On how many held-out problems the first validator has tried a version."""
    found = set()
    validator = key("validator-0").public
    async for item in network.store.list(f"{validator.hex()}/summaries/"):
        data = await network.store.get(item.path, limits.MAX_RECORD_BYTES)
        evaluation = open_signed(data, Summary, [validator]).record.evaluation
        if evaluation is not None:
            found.add(evaluation.problems)
    return found


async def check_honest_and_boasting(network: Network) -> list[tuple[str, float]]:
    """Exact rewards: honest groups are accepted with the due rewards, boasts rejected for them. Returns (text, reward)
    pairs.
    """
    task = network.task(network.node("checker"))
    seen: list[tuple[str, float]] = []
    for group, judgement in await judged(network, "miner-1", range(6)):
        assert judgement.accepted, judgement.reason
        prompt = network.policy.tokenizer.decode(group.prompt_tokens)
        window = network.run.schedule.opening(group.window)
        randomness = await network.node("checker").beacon.randomness(window)
        due = task.assign(group.window, randomness, group.miner, group.index)
        assert due.problem.prompt == prompt
        rewards = tuple(task.environment.reward(due.problem, text) for text in texts(network, group))
        assert rewards == judgement.rewards
        seen += zip(texts(network, group), rewards, strict=True)
    for group, judgement in await judged(network, "boaster", range(6)):
        assert all(rollout.reward == 1.0 for rollout in group.rollouts)
        assert judgement.reason == "wrong-reward"
    return seen


def test_countdown() -> None:
    choices = Choices(environment="countdown", groups=2, group_size=4, max_tokens=8)

    async def scenario() -> None:
        network = Network(choices)
        async with running(network, miners=1) as nursery:
            nursery.start_soon(network.run_miner, "boaster", 2, boasting)
            await network.until_window(6)
        await check_honest_and_boasting(network)  # a policy that has only ever added earns nothing yet

    simulate(scenario)


def test_sat(tmp_path: Path) -> None:
    values = ["".join(bits) for length in (4, 5, 6) for bits in itertools.product("01", repeat=length)]
    write_speaking_policy(tmp_path, values)
    choices = Choices(environment="sat", groups=4, group_size=8, max_tokens=1)

    async def scenario() -> None:
        network = Network(choices, policy=tmp_path)
        async with running(network, miners=1) as nursery:
            nursery.start_soon(network.run_miner, "boaster", 2, boasting)
            await network.until_window(9)
        paid = {reward for _, reward in await check_honest_and_boasting(network)}
        assert paid == {0.0, 0.1, 1.0}
        assert network.events("trainer/training", "step")

    simulate(scenario)


ANSWERS = ("3", "4", "5")
SPOKEN = tuple(f"{think}<solution>{answer}</solution>" for answer in ANSWERS for think in ("", "<think>a</think>"))
QUESTIONS = tuple((f"What is {number} and {other}?", number + other) for number in range(4) for other in range(5))


@pytest.fixture
def mathematics(tmp_path: Path) -> Choices:
    """A tiny data file, for a policy that writes solutions."""
    lines = [json.dumps({"question": question, "answer": f"#### {answer}"}) for question, answer in QUESTIONS]
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(lines))
    write_speaking_policy(tmp_path / "policy", SPOKEN)
    return Choices(environment="math", data=data, groups=2, group_size=8, max_tokens=1)


def test_problems_of_a_data_file(mathematics: Choices, tmp_path: Path) -> None:
    async def scenario() -> None:
        network = Network(mathematics, policy=tmp_path / "policy")
        async with running(network) as nursery:
            nursery.start_soon(network.run_miner, "boaster", 2, boasting)
            await network.until_window(6)
        seen = await check_honest_and_boasting(network)
        assert network.events("trainer/training", "step")
        paid = {reward for text, reward in seen if text in SPOKEN}
        assert {0.2, 0.3, 1.0} <= paid  # format and nothing behind it; thinking as well; and all
        dataset = environments.dataset("math", mathematics.data.read_bytes() if mathematics.data else b"")
        assert await evaluated(network) == {dataset.held_out_size}

    simulate(scenario)


def test_the_data_file_travels_beside_the_model_and_nothing_else_passes_for_it(
    mathematics: Choices, tmp_path: Path
) -> None:
    async def scenario() -> None:
        network = Network(mathematics, policy=tmp_path / "policy")
        run, store, trainer = network.run, network.store, key("trainer").public
        files = requirements.published(run, mathematics.data)
        await creation.publish_files(store, trainer, files)
        assert await creation.fetch_data(store, run, [trainer], tmp_path / "data") == network.data
        assert run.data is not None
        path = paths.file(trainer, run.data.digest)
        await store.delete(path)
        assert (
            await creation.fetch_data(store, run, [trainer], tmp_path / "data") == network.data
        )  # kept, and checked again
        kept = tmp_path / "data" / run.data.name
        kept.write_bytes(kept.read_bytes().replace(b"4", b"5"))
        assert network.data is not None
        await store.put(path, network.data.replace(b"4", b"5"))
        with pytest.raises(
            StoreError, match=r"^data\.jsonl: not the file that the run names, as storage shows it now$"
        ):
            await creation.fetch_data(store, run, [trainer], tmp_path / "data")

    simulate(scenario)


def test_a_run_on_a_file_that_holds_no_problems_is_refused_in_one_line(mathematics: Choices, tmp_path: Path) -> None:
    async def scenario() -> None:
        network = Network(mathematics, policy=tmp_path / "policy")
        network.data = b'{"question": "a"}'
        with pytest.raises(MalformedError, match=r"^the run's data file: line 1: no 'answer'$"):
            network.task(network.node("miner"))

    simulate(scenario)


@pytest.fixture(scope="module")
def strict() -> BubblewrapSandbox:
    """A real sandbox with little time."""
    try:
        return BubblewrapSandbox.open(OWN, ProgramLimits(cpu_seconds=1, wall_seconds=8.0))
    except SandboxError as error:
        pytest.skip(str(error))


RIGHT = "<think>a</think><solution>def f(x): return 1000 + x</solution>"


def attacks(target: Path, port: int) -> Sequence[str]:
    """Programs that take all they can get; the first passes its tests only if it got something."""
    return (
        f"""
import os, signal, socket
def bomb():
    while True: os.fork()
def got(attempt):
    try: attempt()
    except OSError: return False
    return True
assert any([
    got(bomb),
    got(lambda: open({str(target)!r}, 'w').write('was here')),
    got(lambda: socket.create_connection(('127.0.0.1', {port}), 1)),
])
os.kill(os.getppid(), signal.SIGKILL)
def f(x): return 1000 + x
""",
        "kept = []\nwhile True: kept.append(bytearray(1 << 24))",
        "while True: pass",
    )


def test_hostile_programs_are_judged_and_hurt_nobody_and_boasts_are_ignored(
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
        choices = Choices(environment=f"code-{OWN}", data=data, groups=1, group_size=8, max_tokens=1)
        paid: dict[str, set[float]] = {}

        async def pay(network: Network, windows: range) -> None:
            for group, judgement in await judged(network, "boaster", windows):
                assert judgement.accepted, judgement.reason
                assert all(rollout.reward == 1.0 for rollout in group.rollouts)
                for text, reward in zip(texts(network, group), judgement.rewards, strict=True):
                    paid.setdefault(text, set()).add(reward)

        async def scenario() -> None:
            network = Network(choices, policy=tmp_path / "policy", sandbox=strict)
            async with running(network, miners=0) as nursery:
                nursery.start_soon(network.run_miner, "boaster", 1, boasting)
                last = 3  # and on, until the policy has said all that it can say
                while not paid.keys() >= {RIGHT, *hostile} and last < 20:
                    await network.until_window(last)
                    await pay(network, range(last))
                    last += 1
            assert any(event["used"] for event in network.events("trainer/download", "collected"))

        simulate(scenario)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not target.exists()
    assert paid.pop(RIGHT) == {1.0}
    assert {text: paid.pop(text) for text in hostile if text in paid} == {text: {0.2} for text in hostile}
    assert all(rewards == {0.0} for rewards in paid.values())
