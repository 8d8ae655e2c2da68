"""What a training loop has of its node: groups come until they are acknowledged, versions are durable."""

from dataclasses import replace

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.store.memory import MemoryStore
from protocol.errors import ChainError
from roles.node.identity import Node
from roles.trainer.spool import INBOX, OUTBOX, SnapshotName, list_snapshots, weights_folder
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.training_spool import TrainingSpool
from tests.support.builders.chains import equal
from tests.support.builders.policies import inline
from tests.support.builders.recipes import demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.builders.verified_batches import put_batch, verified_batch
from tests.support.faults.decorated_store import DecoratedStore, SlowStore
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import simulate

MAX_STALENESS = 3


class Site:
    """A trainer's node in memory."""

    def __init__(self) -> None:
        self.network = Network(demo_rules())
        self.state = MemoryStore()
        self.node: Node = replace(self.network.node("trainer"), state=self.state, run_sync=inline)

    async def open(self) -> TrainingSpool:
        """Return the border as a process finds it that has just been started."""
        spool = TrainingSpool(self.node, MAX_STALENESS)
        await spool.begin(lambda: self.network.weights)
        return spool

    def weights(self) -> TensorSource:
        return TensorSource.of(self.network.weights)

    async def deliver(self, number: int, version: int) -> None:
        """Put a batch of two groups into the inbox, as a collector does."""
        await put_batch(self.state, number, version)

    async def inbox(self) -> list[str]:
        return [item.path async for item in self.state.list(INBOX)]


async def waiting(spool: TrainingSpool) -> set[bytes]:
    """Return the groups that are given out now."""
    return {group.digest for group in await spool.groups(0)}


async def test_versions_are_published_as_they_were_given_from_genesis_on() -> None:
    site = Site()
    spool = await site.open()
    assert [name.version for name in await list_snapshots(site.state)] == [0]
    weights = {name: tensor + 1 for name, tensor in site.network.weights.items()}
    assert await spool.publish(TensorSource.of(weights), step=40) == 1
    assert (await list_snapshots(site.state))[-1] == SnapshotName(1, 40)
    assert equal(await get_snapshot(site.state, SnapshotName(1, 40)), weights)
    restarted = await site.open()
    assert restarted.version == 1


@pytest.mark.parametrize("step", [-1, 1 << 53])
async def test_a_step_that_no_manifest_can_name_is_refused_before_it_is_durable(step: int) -> None:
    site = Site()
    spool = await site.open()
    with pytest.raises(ValueError, match="step"):
        await spool.publish(site.weights(), step)
    assert [name.version for name in await list_snapshots(site.state)] == [0]
    assert await (await site.open()).publish(site.weights(), 1) == 1


class InterruptedStore(DecoratedStore):
    """A state whose user presses Ctrl-C when a snapshot has just become durable, once."""

    is_interrupted = False

    async def put(self, path: str, data: bytes) -> None:
        await self.inner.put(path, data)
        if path.startswith(OUTBOX) and not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt


async def test_a_version_that_became_durable_at_an_interruption_is_not_published_again() -> None:
    site = Site()
    spool = await site.open()
    spool = TrainingSpool(replace(site.node, state=InterruptedStore(site.state)), MAX_STALENESS)
    await spool.begin(lambda: site.network.weights)
    others = {name: tensor + 1 for name, tensor in site.network.weights.items()}
    with pytest.raises(KeyboardInterrupt):
        await spool.publish(site.weights(), 5)
    assert await spool.publish(TensorSource.of(others), 6) == spool.version == 2
    assert await list_snapshots(site.state) == [
        SnapshotName(version, step) for version, step in ((0, 0), (1, 5), (2, 6))
    ]
    assert equal(await get_snapshot(site.state, SnapshotName(1, 5)), site.network.weights)
    assert equal(await get_snapshot(site.state, SnapshotName(2, 6)), others)


async def test_a_caller_can_wait_until_storage_has_taken_versions() -> None:
    site = Site()
    spool = await site.open()
    await spool.publish(site.weights(), 1)
    await spool.wait_for_uploads(2)
    with trio.move_on_after(10) as scope:
        await spool.wait_for_uploads(1)
    assert scope.cancelled_caught
    await site.state.delete(SnapshotName(0, 0).path)
    await spool.wait_for_uploads(1)


async def test_files_of_a_version_that_nobody_noted_are_deleted_and_another_policy_is_refused() -> None:
    site = Site()
    await site.open()
    await site.state.put(f"{weights_folder(1)}00000", b"of a process that was killed")
    await site.open()
    assert not [item async for item in site.state.list(weights_folder(1))]
    other = Site()
    spool = TrainingSpool(other.node, MAX_STALENESS)
    with pytest.raises(ChainError, match="not the genesis"):
        await spool.begin(lambda: {name: torch.zeros_like(t) for name, t in other.network.weights.items()})


async def test_a_call_that_is_cancelled_while_it_reads_loses_no_group() -> None:
    site = Site()
    site.node = replace(site.node, state=SlowStore(get_seconds=1.0))
    spool = await site.open()
    for number in (1, 2):
        await put_batch(site.node.state, number)
    with trio.move_on_after(1.5) as scope:  # between the two batches
        await spool.groups(1)
    assert scope.cancelled_caught
    delivered = {group.digest for number in (1, 2) for group in verified_batch(number, 0).groups}
    assert await waiting(spool) == delivered
    first, *others = delivered
    await spool.acknowledge(others)
    assert len([item async for item in site.node.state.list(INBOX)]) == 1  # one group of its batch is still needed
    await spool.acknowledge([first])
    assert not [item async for item in site.node.state.list(INBOX)]


async def test_groups_that_became_too_old_do_not_come_and_leave_the_inbox() -> None:
    site = Site()
    spool = await site.open()
    await site.deliver(1, version=0)
    assert len(await spool.groups(2)) == 2  # given out, and never acknowledged
    await site.deliver(2, version=1)
    for step in range(1, MAX_STALENESS + 2):
        await spool.publish(site.weights(), step)
        for name in await list_snapshots(site.state):
            await site.state.delete(name.path)
    assert len(await waiting(spool)) == 2
    assert await site.inbox() == [f"{INBOX}{2:010d}-x"]


@given(st.lists(st.sampled_from(["deliver", "deliver again", "take", "acknowledge", "kill"]), max_size=30))
def test_every_group_comes_until_it_is_acknowledged_and_never_after_it(steps: list[str]) -> None:
    async def play() -> None:
        site = Site()
        spool = await site.open()
        delivered, acknowledged, taken, known = set[bytes](), set[bytes](), set[bytes](), list[bytes]()
        batches: dict[int, set[bytes]] = {}
        for number, step in enumerate(steps):
            if step.startswith("deliver"):
                batch = max(1, number - 1) if step == "deliver again" else number + 1
                await site.deliver(batch, version=0)
                batches[batch] = {group.digest for group in verified_batch(batch, 0).groups}
                delivered |= batches[batch]
            elif step == "take":
                groups = await waiting(spool)
                assert not groups & (acknowledged | taken)
                taken |= groups
                known += groups
                assert delivered == taken | acknowledged
            elif step == "acknowledge" and known:  # also what the process had before it was killed, as of a checkpoint
                digest = known.pop()
                await spool.acknowledge([digest])
                acknowledged.add(digest)
            elif step == "kill":
                spool, taken = await site.open(), set()
        assert await waiting(await site.open()) == delivered - acknowledged
        needed = [number for number, groups in sorted(batches.items()) if groups - acknowledged]
        assert [int(path.removeprefix(INBOX)[:10]) for path in await site.inbox()] == needed

    simulate(play)
