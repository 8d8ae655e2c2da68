"""A trainer killed at any moment: the chain stays valid and gapless, and no group is trained on twice."""

import random

import pytest
import trio
from trio.testing import MockClock

from grailnode.observe.chain_check import verify_chain
from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from roles.trainer.publish.fencing import FencedError
from tests.support.simulation.network import Network

CHOICES = Choices(groups=4, group_size=8)


@pytest.mark.parametrize("seed", range(3))
def test_a_trainer_that_is_killed_again_and_again_goes_on_where_it_was(seed: int):
    async def scenario() -> None:
        network = Network(CHOICES)
        moments = random.Random(seed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run_beacon)
            nursery.start_soon(network.run_miner, "miner-1")
            nursery.start_soon(network.run_validator)
            for _ in range(6):
                with trio.move_on_after(moments.uniform(0.3, 4.0)):
                    await network.run_trainer()
            with trio.move_on_after(6):
                await network.run_trainer()
            nursery.cancel_scope.cancel()
        head = await network.head()
        assert head.version >= 3
        assert (await verify_chain(network.node("checker"), lambda line: None)).version == head.version
        published = [event["version"] for event in network.events("trainer/upload", "published")]
        assert sorted(set(published)) == list(range(published[-1] + 1))  # gapless
        accounts = [item.path async for item in network.states["trainer"].list("outcomes/")]
        assert len(accounts) == len(set(accounts)) > 0

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def test_two_trainers_under_one_key_end_with_one():
    async def scenario() -> None:
        network = Network(CHOICES)
        ended: list[BaseException] = []

        async def first() -> None:
            try:
                await network.run_trainer()
            except* FencedError as group:
                ended.append(group)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.run_beacon)
            nursery.start_soon(network.run_miner, "miner-1")
            nursery.start_soon(network.run_validator)
            nursery.start_soon(first)
            await network.until_window(3)
            copied = MemoryStore()  # the same key on another machine, restored from a backup of the first one's state
            async for item in network.states["trainer"].list(""):
                await copied.put(item.path, await network.states["trainer"].get(item.path, 1 << 30))
            network.states["trainer"] = copied
            nursery.start_soon(network.run_trainer)
            await network.until_window(7)
            nursery.cancel_scope.cancel()
        assert len(ended) == 1
        assert (await verify_chain(network.node("checker"), lambda line: None)).version >= 3

    trio.run(scenario, clock=MockClock(autojump_threshold=0))
