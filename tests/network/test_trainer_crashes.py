"""A trainer killed at any moment: the chain stays valid and gapless, and no group is trained on twice."""

import random
from collections.abc import Awaitable, Callable
from functools import cache

import pytest
import trio

from grailnode.observe.chain_check import verify_chain
from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.ports import FencedError, ObjectStore
from tests.support.builders.snapshots import snapshot_views
from tests.support.builders.verified_batches import GROUPS, put_batch
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.measuring.store_listing import copy_objects
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation import small_policy
from tests.support.simulation.faulty_network import RULES as OPERATION_CHOICES
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, newest_published
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.trainer_events import trained_groups
from tests.support.simulation.virtual_clock import run_seeded, running


@pytest.mark.parametrize(("seed", "checkpoint_versions"), few_daily([(0, 1), (1, 1), (2, 3), (3, 100)], 4))
async def test_a_trainer_that_is_killed_repeatedly_goes_on(seed: int, checkpoint_versions: int):
    """With a checkpoint for each version it goes on where it was, otherwise behind what is published."""
    network = Network(RULES)
    network.checkpoint_versions = checkpoint_versions
    moments = random.Random(seed)
    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_miner, "miner-1")
        nursery.start_soon(network.run_validator)
        for _ in range(6):
            network.node("trainer", "/training").telemetry.event("started")
            with trio.move_on_after(moments.uniform(0.3, 4.0)):
                await network.run_trainer()
        network.node("trainer", "/training").telemetry.event("started")
        with trio.move_on_after(6):
            await network.run_trainer()
    head = await network.head()
    assert head.version >= 3
    assert (await verify_chain(network.node("checker"), lambda line: None)).version == head.version
    assert newest_published(network) >= 3
    outcomes = [item.path async for item in network.states["trainer"].list("outcomes/")]
    assert len(outcomes) == len(set(outcomes)) > 0
    groups = trained_groups(network.logs["trainer/training"].events)
    assert len(groups) == len(set(groups)) > 0
    behind = [event["behind"] for event in network.events("trainer/training", "resumed")]
    assert (max(behind) > 0) == (checkpoint_versions > 1)


async def test_of_two_trainers_with_one_key_one_stops():
    network = Network(RULES)
    fenced: list[BaseException] = []

    async def first() -> None:
        try:
            await network.run_trainer()
        except* FencedError as group:
            fenced.append(group)

    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_miner, "miner-1")
        nursery.start_soon(network.run_validator)
        nursery.start_soon(first)
        await network.until_window(3)
        # A backup of the first trainer's state is restored on another machine with the same key.
        network.states["trainer"] = await copy_objects(network.states["trainer"], MemoryStore())
        nursery.start_soon(network.run_trainer)
        await network.until_window(7)
    assert len(fenced) == 1
    assert (await verify_chain(network.node("checker"), lambda line: None)).version >= 3


# A trainer whose process is killed before or after any one operation on its stores makes the same weights. What a kill
# after an operation leaves is mostly what a kill before the next one leaves, so those run with the slow tests.


BATCHES = 2


class Trainer(Network):
    """One trainer of which one process crashes at its n-th put, get or delete, counted over all its restarts."""

    store: RecordingStore

    def __init__(self, process: str, operation: int, after: bool) -> None:
        super().__init__(OPERATION_CHOICES, policy=small_policy.DIRECTORY)
        self.process = process
        self.store = RecordingStore()
        self.disk = RecordingStore()
        self.trigger = CrashTrigger(lambda name, path: name != "list", operation, after)

    def medium(self, name: str, process: str) -> ObjectStore:
        return CrashingStore(self.store, self.trigger) if process == self.process else self.store

    def durable(self, name: str, process: str) -> ObjectStore:
        return CrashingStore(self.disk, self.trigger) if process == self.process else self.disk

    async def supervise(self, main: Callable[[], Awaitable[None]], may_crash: bool) -> None:
        """Run a process, and start it again whenever it has died."""
        while True:
            with trio.CancelScope() as scope:
                if may_crash:
                    self.trigger.crash = cancelling(scope)
                await main()
            await trio.sleep(0.05)

    async def publish_batches(self) -> dict[int, str]:
        """Run until all batches were trained on and published; return the digest of each version's weights."""
        settings = self.trainer_settings(GROUPS, anchor_interval=2, keep_patches=2, keep_anchors=1)
        processes = self.trainer_processes(settings)
        async with running(self.run_beacon) as nursery:
            for process in ("/training", "/upload"):
                nursery.start_soon(self.supervise, processes[process], self.process == process)
            for number in range(BATCHES):
                await self._wait_until_published(number)
                await put_batch(self.disk, number)
            await self._wait_until_published(BATCHES)
            await trio.sleep(1)
        weights = await verify_chain(Network.node(self, "checker"), lambda line: None)
        assert weights.version == BATCHES
        names = [
            put.path.rsplit("/", 1)[-1].split("-")
            for put in self.store.under(paths.kind_prefix(key("trainer").public, "manifests"))
        ]
        assert len({number for number, _ in names}) == len({digest for _, digest in names}) == BATCHES + 1
        views = snapshot_views(self.disk.puts)
        assert all(len(digests) == 1 for digests in views.values())
        assert views[BATCHES] == {weights.digest}
        return {version: min(digests).hex() for version, digests in views.items()}

    async def _wait_until_published(self, version: int) -> None:
        while not any(put.path.endswith(f"chain/weights/{version:010d}") for put in self.disk.puts):
            await trio.sleep(0.02)


async def play(process: str, operation: int, after: bool) -> tuple[dict[int, str], bool]:
    """Return the digests of a trainer's weights by version, and whether it died."""
    with trio.fail_after(600):
        trainer = Trainer(process, operation, after)
        return await trainer.publish_batches(), trainer.trigger.has_fired


@cache
def weights_without_crash() -> dict[int, str]:
    """Return the digests of a trainer's weights by version if no process dies."""
    weights, _ = run_seeded(0, play, "/training", 1 << 60, False)
    return dict(weights)


KILLED = [("/training", False), ("/upload", False), ("/training", True), ("/upload", True)]


@pytest.mark.parametrize(("process", "after"), few_daily(KILLED, 4))
def test_a_trainer_killed_at_any_operation_makes_the_same_weights(process: str, after: bool):
    assert len(set(weights_without_crash().values())) == BATCHES + 1
    crashes = 0
    for operation in range(1000):
        weights, has_crashed = run_seeded(0, play, process, operation, after)
        assert weights == weights_without_crash(), f"killed {'after' if after else 'before'} operation {operation}"
        if not has_crashed:
            break
        crashes += 1
    assert crashes > 5
