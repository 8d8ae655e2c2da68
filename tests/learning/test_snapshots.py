"""What is published is the policy of one moment, though training went on while it was written."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import trio
from trio.testing import MockClock

from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.optimizer import AdamWSettings
from roles.trainer.learn.replay_buffer import ReplayBuffer, ReplaySettings
from roles.trainer.learn.snapshot import SnapshotSource
from roles.trainer.learn.training import CHECKPOINT, Training, TrainingSettings
from roles.trainer.spool import get_snapshot, snapshots
from tests.learning.groups import group
from tests.support.simulation.network import Network

SETTINGS = LearnerSettings(optimizer=AdamWSettings(learning_rate=1e-3))
STEP_SECONDS, PUT_SECONDS = 1.0, 1.7


class SlowState(MemoryStore):
    """Durable storage that takes its time."""

    async def put(self, path: str, data: bytes) -> None:
        await trio.sleep(PUT_SECONDS)
        await super().put(path, data)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_snapshot_is_a_rounded_copy_that_later_steps_do_not_touch():
    masters = {"a": torch.randn(5, 7), "b": torch.randn(())}
    source = SnapshotSource(masters, torch.bfloat16)
    first = source.take()
    expected = {name: tensor.bfloat16() for name, tensor in masters.items()}
    first.wait_before_writing()
    masters["a"] += 1
    second = source.take()
    assert first.ready
    assert second.ready
    assert equal(first.tensors(), expected)
    assert equal(second.tensors(), {name: tensor.bfloat16() for name, tensor in masters.items()})


def test_a_checkpoint_is_the_learner_of_its_moment():
    async def scenario() -> None:
        network = Network(Choices())
        one, other = (Learner(network.compute.model, network.weights, SETTINGS) for _ in range(2))
        one.step([group("a")])
        moment, view = one.begin_checkpoint(), one.bf16_view()
        later = one.step([group("b")])
        assert not equal(one.bf16_view(), view)
        assert equal(moment.bf16_view(), view)
        other.restore(moment.state())
        assert (other.steps, equal(other.bf16_view(), view)) == (1, True)
        assert other.step([group("b")]) == later
        assert equal(other.bf16_view(), one.bf16_view())

    trio.run(scenario)


def test_training_goes_on_while_versions_are_written_and_each_version_is_one_step_s_policy():
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
        for name in "abcd":
            buffer.add(group(name))
        with trio.move_on_after(30):
            await Training(node, learner, buffer, lambda: network.weights, TrainingSettings(2, 1)).run()
        written = await snapshots(state)
        assert [snapshot.version for snapshot in written] == list(range(len(written)))
        assert len(written) >= 5
        steps = [snapshot.optimizer_step for snapshot in written]
        assert learner.steps >= 20  # of 30 seconds: none was spent waiting for a write
        assert all(later - earlier >= 2 for earlier, later in pairwise(steps[1:]))
        for snapshot in written:
            assert equal(dict(await get_snapshot(state, snapshot)), views[snapshot.optimizer_step])
        again = Learner(network.compute.model, network.weights, SETTINGS)
        resumed = Training(
            node, again, ReplayBuffer(ReplaySettings(1 << 30, 0.7, 1000, 1000), 0), dict, TrainingSettings(9, 1)
        )
        with trio.move_on_after(10):
            await resumed.run()
        assert await state.get(CHECKPOINT, 1 << 30)
        assert equal(again.bf16_view(), views[again.steps])

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
