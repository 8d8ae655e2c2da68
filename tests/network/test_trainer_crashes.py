"""A trainer killed at any moment: the chain stays valid and gapless, and no group is trained on twice."""

import random

import pytest
import trio

from grailnode.observe.chain_check import verify_chain
from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from roles.trainer.publish.fencing import FencedError
from tests.support.simulation.network import Network
from tests.support.simulation.trained_groups import trained_groups
from tests.support.simulation.virtual_clock import simulated

CHOICES = Choices(groups=4, group_size=8)


@pytest.mark.parametrize(("seed", "checkpoint_versions"), [(0, 1), (1, 1), (2, 3), (3, 100)])
@simulated
async def test_a_trainer_that_is_killed_repeatedly_goes_on(seed: int, checkpoint_versions: int):
    """With a checkpoint for each version it goes on where it was, otherwise behind what is published."""
    network = Network(CHOICES)
    network.checkpoint_versions = checkpoint_versions
    moments = random.Random(seed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run_beacon)
        nursery.start_soon(network.run_miner, "miner-1")
        nursery.start_soon(network.run_validator)
        for _ in range(6):
            network.node("trainer", "/training").telemetry.event("started")
            with trio.move_on_after(moments.uniform(0.3, 4.0)):
                await network.run_trainer()
        network.node("trainer", "/training").telemetry.event("started")
        with trio.move_on_after(6):
            await network.run_trainer()
        nursery.cancel_scope.cancel()
    head = await network.head()
    assert head.version >= 3
    assert (await verify_chain(network.node("checker"), lambda line: None)).version == head.version
    versions = [event["version"] for event in network.events("trainer/upload", "published")]
    assert sorted(set(versions)) == list(range(versions[-1] + 1))  # gapless
    outcomes = [item.path async for item in network.states["trainer"].list("outcomes/")]
    assert len(outcomes) == len(set(outcomes)) > 0
    groups = trained_groups(network.logs["trainer/training"].events)
    assert len(groups) == len(set(groups)) > 0
    behind = [event["behind"] for event in network.events("trainer/training", "resumed")]
    assert (max(behind) > 0) == (checkpoint_versions > 1)


@simulated
async def test_of_two_trainers_with_one_key_one_stops():
    network = Network(CHOICES)
    fenced: list[BaseException] = []

    async def first() -> None:
        try:
            await network.run_trainer()
        except* FencedError as group:
            fenced.append(group)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run_beacon)
        nursery.start_soon(network.run_miner, "miner-1")
        nursery.start_soon(network.run_validator)
        nursery.start_soon(first)
        await network.until_window(3)
        backup = MemoryStore()  # of the first trainer's state, restored on another machine with the same key
        async for item in network.states["trainer"].list(""):
            await backup.put(item.path, await network.states["trainer"].get(item.path, 1 << 30))
        network.states["trainer"] = backup
        nursery.start_soon(network.run_trainer)
        await network.until_window(7)
        nursery.cancel_scope.cancel()
    assert len(fenced) == 1
    assert (await verify_chain(network.node("checker"), lambda line: None)).version >= 3
