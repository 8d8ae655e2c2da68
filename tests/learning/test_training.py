"""The training loop: each version is the policy of one step, although training goes on while it is written."""

import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any, get_args

import pytest
import torch
import trio

from grailnode.demo.demo_network import DemoSettings
from grailnode.store.memory import MemoryStore
from protocol import environments
from protocol.environments.base import Problem
from protocol.environments.mixture import Mixture
from protocol.environments.seeded_rng import DrawnProblems, SeededRng
from roles.ports import StateError
from roles.trainer.learn.checkpoint_files import (
    NOTES,
    CheckpointNote,
    newest_checkpoint,
    put_checkpoint,
    repair_checkpoint,
)
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer
from roles.trainer.learn.state_rows import SavedRows, Share, StateRows
from roles.trainer.learn.training import Training
from roles.trainer.learn.training_settings import OptimizerName, OptimizerSettings, ReplaySettings, TrainingSettings
from roles.trainer.spool import INBOX, SnapshotName, list_snapshots, put_snapshot
from roles.trainer.tensor_shards import run_inline
from tests.support.builders.chains import equal
from tests.support.builders.recipes import demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.builders.verified_batches import put_batch, verified_batch
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling, changes
from tests.support.processes.ranks import assert_equal, group
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.learning import Setup, Simulation, run
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import simulated

SETTINGS = LearnerSettings(optimizer=OptimizerSettings(learning_rate=1e-3, warmup_steps=0))
STEP_SECONDS, PUT_SECONDS = 1.0, 1.7


class SlowState(MemoryStore):
    """Durable storage whose writes take some time."""

    writing = False

    async def put(self, path: str, data: bytes) -> None:
        self.writing = True
        await trio.sleep(PUT_SECONDS)
        await super().put(path, data)
        self.writing = False


@simulated
@pytest.mark.parametrize("name", get_args(OptimizerName))
async def test_a_learner_goes_on_from_its_files_bit_for_bit(name: OptimizerName):
    network = Network(demo_rules())
    settings = LearnerSettings(optimizer=OptimizerSettings(optimizer=name, learning_rate=1e-3, warmup_steps=0))
    one, other = (Learner(network.compute.model, network.weights, settings) for _ in range(2))
    one.step([group("a")])
    state = MemoryStore()
    parts, _ = await one.save(state, run_inline, 1 << 20, "saved/", "")
    await other.load(state, SavedRows("saved/", tuple(parts), one.steps), run_inline)
    assert other.step([group("b")]) == one.step([group("b")])
    assert equal(other.view(), one.view())


def buffer_of(letters: str) -> ReplayBuffer:
    buffer = ReplayBuffer(ReplaySettings(decay=0.7, max_staleness=1000, max_uses=1000), 0)
    for letter in letters:
        buffer.add(group(letter))
    return buffer


@dataclass
class Peer:
    """A rank in a thread of this process."""

    rank: int
    messages: list[Any]
    barrier: Barrier

    def exchange(self, message: Any) -> list[Any]:
        self.messages[self.rank] = message
        self.barrier.wait(60)
        messages = [*self.messages]
        self.barrier.wait(60)
        return messages

    def send(self, message: Any, source: int) -> Any:
        return self.exchange(message)[source]


def rows_of(rank: int, value: float) -> tuple[torch.Tensor, StateRows]:
    tensor = torch.full((2, 3), value)
    return tensor, StateRows({"master/w": tensor}, {"master/w": torch.Size((4, 3))}, Share(rank, 2))


async def test_ranks_do_not_load_what_a_host_has_of_another_checkpoint_of_the_same_step():
    """Rank 0 is killed before its note; its host then trains alone, and the other host comes back."""

    async def put_values(states: list[MemoryStore], value: float) -> CheckpointNote:
        async def save(folder: str, _previous: str) -> tuple[list[int], int]:
            return [await rows_of(r, value)[1].save(states[r], folder, run_inline, 4096) for r in range(2)], 1

        await put_checkpoint(states[0], (1, 2), save, b"")
        note = await newest_checkpoint(states[0])
        assert note is not None
        return note

    one, other = MemoryStore(), MemoryStore()
    await one.delete((await put_values([one, other], 1.0)).path)
    note = await put_values([one, one], 2.0)
    messages, barrier, tensors = [None, None], Barrier(2), list[torch.Tensor]()
    async with trio.open_nursery() as nursery:
        for rank, state in enumerate((one, other)):
            tensor, rows = rows_of(rank, 0.0)
            tensors.append(tensor)
            peer = Peer(rank, messages, barrier)
            nursery.start_soon(rows.load, state, note.rows, trio.to_thread.run_sync, peer)
    assert all(torch.all(tensor == 2.0) for tensor in tensors)


async def test_each_rank_says_that_a_checkpoint_is_of_another_model():
    state = MemoryStore()
    files = await rows_of(0, 1.0)[1].save(state, "saved/", run_inline, 4096)
    other = StateRows({"master/v": torch.zeros(2, 3)}, {"master/v": torch.Size((2, 3))}, Share())
    with pytest.raises(StateError, match="checkpoints/ of this node's state: a saved state of another model"):
        await other.load(state, SavedRows("saved/", (files,), 1), run_inline)


async def test_a_note_of_another_format_is_named_and_repaired():
    network, state = Network(demo_rules()), MemoryStore()
    learner = Learner(network.compute.model, network.weights, SETTINGS)
    await put_snapshot(state, SnapshotName(1, 1), learner.view_source(), run_inline)
    await state.put(f"{NOTES}{1:012d}", b"another format")
    with pytest.raises(StateError, match=r"training/0+1: not a checkpoint of this version.*`grailnode repair`"):
        await newest_checkpoint(state)
    await repair_checkpoint(state, lambda line: None, chain_is_rebuilt=False)
    note = await newest_checkpoint(state)
    assert note is not None
    assert (note.version, note.step) == (1, 0)


async def test_waiting_groups_in_another_format_are_named_and_repaired_without_the_loss_of_moments():
    network, state, lines = Network(demo_rules()), MemoryStore(), list[str]()
    learner = Learner(network.compute.model, network.weights, SETTINGS)
    learner.step([group("a")])
    await put_snapshot(state, SnapshotName(1, 1), learner.view_source(), run_inline)
    await put_checkpoint(state, (1, 1), partial(learner.save, state, run_inline, 1 << 20), b"another format")
    node = replace(network.node("trainer"), state=state)
    restarted = Learner(network.compute.model, network.weights, SETTINGS)
    training = Training(node, restarted, buffer_of(""), lambda: network.weights, TrainingSettings())
    with pytest.raises(StateError, match=r"checkpoints/0+1-.*: not a saved replay buffer.*`grailnode repair`"):
        await training.run()
    await repair_checkpoint(state, lines.append, chain_is_rebuilt=False)
    assert [line.partition("replay: ")[2] for line in lines] == ["cannot be read; the groups that waited are lost"]
    await training._restore()
    assert_equal(restarted.state(), learner.state())


@simulated
async def test_gradients_are_computed_while_a_version_is_written_and_each_version_is_the_policy_of_one_step():
    network = Network(demo_rules())
    learner = Learner(network.compute.model, network.weights, SETTINGS)
    views: dict[int, dict[str, torch.Tensor]] = {0: learner.view()}
    state, concurrent_steps = SlowState(), 0

    async def run_sync(work: Any, *arguments: object) -> Any:
        nonlocal concurrent_steps
        if work == learner.gradients:
            await trio.sleep(STEP_SECONDS)
            concurrent_steps += state.writing
        result = work(*arguments)
        views[learner.steps] = learner.view()
        return result

    node = replace(network.node("trainer"), state=state, run_sync=run_sync)
    settings = TrainingSettings(groups_per_step=2, file_bytes=1 << 19)
    with trio.move_on_after(40):
        await Training(node, learner, buffer_of("abcd"), lambda: network.weights, settings).run()
    names = await list_snapshots(state)
    assert [name.version for name in names] == list(range(len(names)))
    assert len(names) >= 4
    assert concurrent_steps >= 3
    for name in names:
        assert equal(await get_snapshot(state, name), views[name.optimizer_step])
    note = await newest_checkpoint(state)
    assert note is not None
    restarted_learner = Learner(network.compute.model, network.weights, SETTINGS)
    with trio.move_on_after(10):
        await Training(node, restarted_learner, buffer_of(""), dict, TrainingSettings(groups_per_step=9)).run()
    assert equal(restarted_learner.view(), views[note.step])


@simulated
async def test_after_a_crash_behind_the_published_version_the_versions_go_on():
    """With a checkpoint every 3 versions: the first version and the fourth have one, and the sixth is the newest."""
    network, state = Network(demo_rules()), MemoryStore()
    node = replace(network.node("trainer"), state=state)
    settings = TrainingSettings(groups_per_step=2, checkpoint_versions=3)

    async def train(steps: int) -> Learner:
        learner = Learner(network.compute.model, network.weights, SETTINGS)
        with trio.CancelScope() as scope:

            async def run_sync(work: Any, *arguments: object) -> Any:
                await trio.sleep(1)
                if work == learner.gradients and learner.steps == steps:
                    await trio.sleep(60)
                    scope.cancel()
                    await trio.sleep_forever()
                return work(*arguments)

            slow = replace(node, run_sync=run_sync)
            await Training(slow, learner, buffer_of("abcd"), lambda: network.weights, settings).run()
        return learner

    first = await train(6)
    names = await list_snapshots(state)
    note = await newest_checkpoint(state)
    assert note is not None
    assert (note.version, note.step, names[-1].version, names[-1].optimizer_step) == (4, 4, 6, 6)
    assert {item.path.split("/")[1] async for item in state.list("checkpoints/")} == {note.folder.split("/")[1]}
    second = await train(6)
    (resumed,) = network.events("trainer", "resumed")
    assert (resumed["version"], resumed["step"], resumed["behind"]) == (6, 4, 2)
    assert equal(second.view(), first.view())  # the same groups were drawn again
    names = await list_snapshots(state)
    assert [(name.version, name.optimizer_step) for name in names[-3:]] == [(6, 6), (7, 5), (8, 6)]


@simulated
async def test_training_ends_after_its_last_step_and_publishes_that_policy():
    """With 3 steps and a version every 2, the third step is a version too; what comes in later is deleted."""
    network, state = Network(demo_rules()), MemoryStore()
    node = replace(network.node("trainer"), state=state)
    settings = TrainingSettings(groups_per_step=2, steps_per_version=2, training_steps=3)

    async def train(learner: Learner) -> None:
        with trio.move_on_after(20):
            await Training(node, learner, buffer_of("ab"), lambda: network.weights, settings).run()

    learner = Learner(network.compute.model, network.weights, SETTINGS)
    await train(learner)
    assert learner.steps == 3
    names = await list_snapshots(state)
    assert names[-1].optimizer_step == 3
    assert equal(await get_snapshot(state, names[-1]), learner.view())

    await state.put(f"{INBOX}late", verified_batch(1, 0).to_bytes())
    resumed = Learner(network.compute.model, network.weights, SETTINGS)
    await train(resumed)
    assert resumed.steps == 3
    assert await list_snapshots(state) == names
    assert [item.path async for item in state.list(INBOX)] == []


@simulated
async def test_a_training_that_is_killed_at_any_change_of_its_state_ends_with_the_same_bits():
    """Its collector is killed too, and delivers every batch again."""
    network = Network(demo_rules())

    async def train(kill_at: int) -> tuple[Learner, CrashTrigger]:
        trigger = CrashTrigger(changes, kill_at, after=True)
        memory = MemoryStore()
        for state in (CrashingStore(memory, trigger), memory):
            for number in range(1, 4):
                await put_batch(memory, number)
            learner = Learner(network.compute.model, network.weights, SETTINGS)
            node = replace(network.node("trainer"), state=state)
            settings = TrainingSettings(groups_per_step=2, training_steps=3, file_bytes=1 << 21)
            with trio.move_on_after(2) as scope:
                trigger.crash = cancelling(scope)
                buffer = ReplayBuffer(ReplaySettings(), 0)
                await Training(node, learner, buffer, lambda: network.weights, settings).run()
        assert [item.path async for item in memory.list(INBOX)] == []
        return learner, trigger

    expected, kills = (await train(1 << 20))[0].state(), 0
    while True:
        learner, trigger = await train(kills)
        if not trigger.has_fired:
            break
        assert_equal(learner.state(), expected)
        kills += 1
    assert kills > 20


# The simulation of learning, by which the demo's settings were chosen: each optimizer learns, the packaged policies
# learn from episodes with the learning rates of the demo, and a policy learns from a mixture of two tasks


@pytest.mark.parametrize(("name", "rate"), few_daily([("adamw", 3e-5), ("adamw-8bit", 3e-5), ("muon", 2e-4)], 3))
def test_every_optimizer_learns_to_add(name: OptimizerName, rate: float) -> None:
    """The updates of Muon are smaller than the first ones of AdamW."""
    setup = Setup(windows=4, groups=16, groups_per_step=8, held_out=64, lag=1, warmup=0)
    assert run(replace(setup, optimizer=name, learning_rate=rate), print)["rise"] > 0.15


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
