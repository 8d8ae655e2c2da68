"""The training loop: each version is the policy of one step, although training goes on while it is written."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import trio

from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.optimizer import AdamWSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer, ReplaySettings
from roles.trainer.learn.training import CHECKPOINT, Training, TrainingSettings
from roles.trainer.spool import INBOX, get_snapshot, list_snapshots
from tests.learning.groups import group
from tests.support.builders.verified_batches import verified_batch
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import simulate

SETTINGS = LearnerSettings(optimizer=AdamWSettings(learning_rate=1e-3))
STEP_SECONDS, PUT_SECONDS = 1.0, 1.7


class SlowState(MemoryStore):
    """Durable storage whose writes take some time."""

    async def put(self, path: str, data: bytes) -> None:
        await trio.sleep(PUT_SECONDS)
        await super().put(path, data)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_later_steps_do_not_affect_a_checkpoint():
    async def scenario() -> None:
        network = Network(Choices())
        one, other = (Learner(network.compute.model, network.weights, SETTINGS) for _ in range(2))
        one.step([group("a")])
        checkpoint, view = one.begin_checkpoint(), one.bf16_view()
        next_report = one.step([group("b")])
        assert not equal(one.bf16_view(), view)
        assert equal(checkpoint.bf16_view(), view)
        other.restore(checkpoint.state())
        assert (other.steps, equal(other.bf16_view(), view)) == (1, True)
        assert other.step([group("b")]) == next_report
        assert equal(other.bf16_view(), one.bf16_view())

    trio.run(scenario)


def test_training_goes_on_while_versions_are_written_and_each_version_is_the_policy_of_one_step():
    async def scenario() -> None:
        network = Network(Choices())
        learner = Learner(network.compute.model, network.weights, SETTINGS)
        views: dict[int, dict[str, torch.Tensor]] = {0: learner.bf16_view()}

        async def run_sync(work: Any, *arguments: object) -> Any:
            if work == learner.step:
                await trio.sleep(STEP_SECONDS)
            result = work(*arguments)
            views[learner.steps] = learner.bf16_view()
            return result

        state = SlowState()
        node = replace(network.node("trainer"), state=state, run_sync=run_sync)
        buffer = ReplayBuffer(ReplaySettings(1 << 30, 0.7, 1000, 1000), 0)
        for letter in "abcd":
            buffer.add(group(letter))
        with trio.move_on_after(30):
            await Training(node, learner, buffer, lambda: network.weights, TrainingSettings(2, 1)).run()
        names = await list_snapshots(state)
        assert [name.version for name in names] == list(range(len(names)))
        assert len(names) >= 5
        steps = [name.optimizer_step for name in names]
        assert learner.steps >= 20  # of 30 seconds: none was spent waiting for a write
        assert all(later - earlier >= 2 for earlier, later in pairwise(steps[1:]))
        for name in names:
            assert equal(dict(await get_snapshot(state, name)), views[name.optimizer_step])
        restarted_learner = Learner(network.compute.model, network.weights, SETTINGS)
        empty_buffer = ReplayBuffer(ReplaySettings(1 << 30, 0.7, 1000, 1000), 0)
        with trio.move_on_after(10):
            await Training(node, restarted_learner, empty_buffer, dict, TrainingSettings(9, 1)).run()
        assert await state.get(CHECKPOINT, 1 << 30)
        assert equal(restarted_learner.bf16_view(), views[restarted_learner.steps])

    simulate(scenario)


def test_training_ends_after_its_last_step_and_publishes_that_policy():
    """With 3 steps and a version every 2, the third step is a version too; what comes in later is deleted."""

    async def scenario() -> None:
        network = Network(Choices())
        state = MemoryStore()
        node = replace(network.node("trainer"), state=state)
        settings = TrainingSettings(2, 2, training_steps=3)

        async def train(learner: Learner) -> None:
            buffer = ReplayBuffer(ReplaySettings(1 << 30, 0.7, 1000, 1000), 0)
            for letter in "ab":
                buffer.add(group(letter))
            with trio.move_on_after(20):
                await Training(node, learner, buffer, lambda: network.weights, settings).run()

        learner = Learner(network.compute.model, network.weights, SETTINGS)
        await train(learner)
        assert learner.steps == 3
        names = await list_snapshots(state)
        assert names[-1].optimizer_step == 3
        assert equal(dict(await get_snapshot(state, names[-1])), learner.bf16_view())

        await state.put(f"{INBOX}late", verified_batch(1, 0).to_bytes())
        resumed = Learner(network.compute.model, network.weights, SETTINGS)
        await train(resumed)
        assert resumed.steps == 3
        assert await list_snapshots(state) == names
        assert [item.path async for item in state.list(INBOX)] == []

    simulate(scenario)
