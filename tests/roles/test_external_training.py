"""The border of a trainer for somebody else's loop: groups come until they are acknowledged, versions are durable."""

from dataclasses import replace

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.store.memory import MemoryStore
from protocol.errors import ChainError
from roles.node.identity import Node
from roles.trainer.external_training import ExternalTraining
from roles.trainer.spool import INBOX, SnapshotName, list_snapshots, weights_folder
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders.chains import equal
from tests.support.builders.policies import inline
from tests.support.builders.recipes import demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.builders.verified_batches import put_batch, verified_batch
from tests.support.faults.decorated_store import SlowStore
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import simulate

MAX_STALENESS = 3


class Site:
    """A trainer's node in memory."""

    def __init__(self) -> None:
        self.network = Network(demo_rules())
        self.state = MemoryStore()
        self.node: Node = replace(self.network.node("trainer"), state=self.state, run_sync=inline)

    async def open(self) -> ExternalTraining:
        """Return the border as a process finds it that has just been started."""
        training = ExternalTraining(self.node, MAX_STALENESS)
        await training.begin(lambda: self.network.weights)
        return training

    async def deliver(self, number: int, version: int) -> None:
        """Put a batch of two groups into the inbox, as a collector does."""
        await put_batch(self.state, number, version)

    async def inbox(self) -> list[str]:
        return [item.path async for item in self.state.list(INBOX)]


async def waiting(training: ExternalTraining) -> set[bytes]:
    """Return the groups that are given out now."""
    return {group.digest for group in await training.groups(0)}


async def test_versions_are_published_as_they_were_given_from_genesis_on() -> None:
    site = Site()
    training = await site.open()
    assert [name.version for name in await list_snapshots(site.state)] == [0]
    weights = {name: tensor + 1 for name, tensor in site.network.weights.items()}
    assert await training.publish(weights, step=40) == 1
    assert (await list_snapshots(site.state))[-1] == SnapshotName(1, 40)
    assert equal(await get_snapshot(site.state, SnapshotName(1, 40)), weights)
    restarted = await site.open()
    assert restarted.version == 1


@pytest.mark.parametrize(("step", "value"), [(-1, 0.0), (1 << 53, 0.0), (1, float("nan")), (1, float("inf"))])
async def test_what_no_follower_could_use_is_refused_before_it_is_durable(step: int, value: float) -> None:
    site = Site()
    training = await site.open()
    weights = {name: tensor + value for name, tensor in site.network.weights.items()}
    with pytest.raises(ValueError, match=r"step|not finite"):
        await training.publish(weights, step)
    assert [name.version for name in await list_snapshots(site.state)] == [0]
    assert await (await site.open()).publish(site.network.weights, 1) == 1


async def test_a_caller_that_publishes_faster_than_storage_takes_versions_waits() -> None:
    site = Site()
    training = await site.open()
    await training.publish(site.network.weights, 1)
    with trio.move_on_after(10) as scope:
        await training.publish(site.network.weights, 2)
    assert scope.cancelled_caught
    await site.state.delete(SnapshotName(0, 0).path)
    assert await training.publish(site.network.weights, 2) == 2


async def test_files_of_a_version_that_nobody_noted_are_deleted_and_another_policy_is_refused() -> None:
    site = Site()
    await site.open()
    await site.state.put(f"{weights_folder(1)}00000", b"of a process that was killed")
    await site.open()
    assert not [item async for item in site.state.list(weights_folder(1))]
    other = Site()
    training = ExternalTraining(other.node, MAX_STALENESS)
    with pytest.raises(ChainError, match="not the genesis"):
        await training.begin(lambda: {name: torch.zeros_like(t) for name, t in other.network.weights.items()})


async def test_a_group_comes_once_and_again_after_a_restart_until_it_is_acknowledged() -> None:
    site = Site()
    training = await site.open()
    await site.deliver(1, version=0)
    first, second = await training.groups(2)
    assert await waiting(training) == set()
    await training.acknowledge({first.digest: 0})
    assert len(await site.inbox()) == 1  # the other group is still there
    restarted = await site.open()
    assert await waiting(restarted) == {second.digest}
    await restarted.acknowledge({second.digest: 0})
    assert await site.inbox() == []
    await site.deliver(1, version=0)  # a collector that was killed delivers again
    again = await site.open()
    assert await waiting(again) == set()
    assert await site.inbox() == []


async def test_a_call_that_is_cancelled_while_it_reads_loses_no_group() -> None:
    site = Site()
    site.node = replace(site.node, state=SlowStore(get_seconds=1.0))
    training = await site.open()
    for number in (1, 2):
        await put_batch(site.node.state, number)
    with trio.move_on_after(1.5) as scope:  # between the two batches
        await training.groups(1)
    assert scope.cancelled_caught
    delivered = {group.digest for number in (1, 2) for group in verified_batch(number, 0).groups}
    assert await waiting(training) == delivered


async def test_groups_that_became_too_old_do_not_come_and_leave_the_inbox() -> None:
    site = Site()
    training = await site.open()
    await site.deliver(1, version=0)
    assert len(await training.groups(2)) == 2  # given out, and never acknowledged
    await site.deliver(2, version=1)
    for step in range(1, MAX_STALENESS + 2):
        await training.publish(site.network.weights, step)
        for name in await list_snapshots(site.state):
            await site.state.delete(name.path)
    assert len(await waiting(training)) == 2
    assert await site.inbox() == [f"{INBOX}{2:010d}-x"]


@given(st.lists(st.sampled_from(["deliver", "deliver again", "take", "acknowledge", "kill"]), max_size=30))
def test_every_group_comes_until_it_is_acknowledged_and_never_after_it(steps: list[str]) -> None:
    async def play() -> None:
        site = Site()
        training = await site.open()
        delivered, acknowledged, taken = set[bytes](), set[bytes](), dict[bytes, VerifiedGroup]()
        for number, step in enumerate(steps):
            if step.startswith("deliver"):
                batch = max(1, number - 1) if step == "deliver again" else number + 1
                await site.deliver(batch, version=0)
                delivered |= {group.digest for group in verified_batch(batch, 0).groups}
            elif step == "take":
                groups = {group.digest: group for group in await training.groups(0)}
                assert not groups.keys() & (acknowledged | taken.keys())
                taken |= groups
                assert delivered == taken.keys() | acknowledged
            elif step == "acknowledge" and taken:
                digest, group = taken.popitem()
                await training.acknowledge({digest: group.version})
                acknowledged.add(digest)
            elif step == "kill":
                training, taken = await site.open(), {}

    simulate(play)
