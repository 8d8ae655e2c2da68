"""A publisher over a store in memory, what a follower verifies of its chain, and publishers that are killed."""

from dataclasses import replace
from typing import Any

import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head
from protocol.digest import Weights, digest_weights
from protocol.identity.authority import Authority, ChainPoint
from protocol.identity.signing import SigningKey, open_announced, sign
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import ObjectStore
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from tests.support.builders.chains import TRAINER, change_elements, equal, make_node, small_run, small_weights
from tests.support.builders.samples import revision
from tests.support.builders.snapshots import put_snapshot
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling, changes
from tests.support.simulation.network import BEGIN, Log, key
from tests.support.simulation.virtual_clock import TrioClock

SUCCESSOR = SigningKey(b"s" * 32)
SETTINGS = PublisherSettings(anchor_interval=2, keep_patches=3, keep_anchors=2, takeover_seconds=1.0, part_bytes=1)


class PublisherTestbed:
    """A store, a trainer's state, and the weights of its versions."""

    def __init__(self) -> None:
        self.store: ObjectStore = MemoryStore()
        self.state, self.log = MemoryStore(), Log("trainer")
        self.weights: list[Weights] = [small_weights(0)]
        for seed in range(1, 12):
            self.weights.append(change_elements(self.weights[-1], seed))
        self.run_id, self.run = small_run(digest_weights(self.weights[0]))
        self.clock = TrioClock(BEGIN)

    def node(self, key: SigningKey = TRAINER, state: MemoryStore | None = None, log: Log | None = None) -> Node:
        return make_node(self.run_id, self.run, self.store, state or self.state, log or self.log, key, clock=self.clock)

    async def snapshot(self, *versions: int, state: MemoryStore | None = None) -> None:
        for version in versions:
            await put_snapshot(state or self.state, version, self.weights[version])

    async def publish(
        self,
        *versions: int,
        seconds: float = 5.0,
        expiry_offset_ms: int = 0,
        settings: PublisherSettings = SETTINGS,
        **options: Any,
    ) -> None:
        """Put snapshots of versions, and run a publisher for some seconds."""
        await self.snapshot(*versions, state=options.get("state"))
        node = self.node(**options)
        await refresh_authority(node)
        with trio.move_on_after(seconds):
            await Publisher(
                node, await History.open(node.state), replace(settings, expiry_offset_ms=expiry_offset_ms)
            ).run()

    async def follower(self, state: MemoryStore | None = None) -> tuple[Node, Follower]:
        node = make_node(self.run_id, self.run, self.store, state or MemoryStore(), Log("miner"), clock=self.clock)
        await refresh_authority(node)
        return node, await Follower(node).open()

    async def revise(self, rewind: ChainPoint | None = None, **changes: Any) -> None:
        """Publish the first revision, which changes the authority or takes versions back."""
        authority = Authority(**(dict(self.run.authority) | changes))
        record = revision(1, self.run_id, run=self.run_id, authority=authority, rewind=rewind)
        await self.store.put(paths.revision(self.run_id, 1), sign(record, key("root")))

    async def assert_followed(
        self,
        version: int,
        state: MemoryStore | None = None,
        *,
        follower: tuple[Node, Follower] | None = None,
        after: object = "",
    ) -> None:
        """Assert that a follower, by default a new one, verifies a version as the newest, bit for bit.

        Args:
            after: what was done before, for the message.
        """
        node, own = follower or await self.follower(state)
        await refresh_authority(node)
        await own.refresh()
        assert own.chain.head is not None
        newest = await own.rebuild(own.chain.head.version)
        assert newest.version == version, after
        assert equal(newest.weights, self.weights[version]), after

    async def head(self, key: SigningKey = TRAINER) -> Head:
        return open_announced(await self.store.get(paths.head(key.public), 1 << 20), Head).record


async def published(versions: int) -> PublisherTestbed:
    """Return a testbed that has published so many versions."""
    testbed = PublisherTestbed()
    await testbed.publish(*range(versions))
    assert (await testbed.head()).version == versions - 1
    return testbed


class LosesPatches(MemoryStore):
    """Storage that acknowledges patches and does not store them while `losing` is True."""

    losing = True

    async def put(self, path: str, data: bytes) -> None:
        if not (self.losing and "/patches/" in path):
            await super().put(path, data)


# A publisher that is killed at one of its puts and deletes, by its number or by its path


async def publish_with(testbed: PublisherTestbed, trigger: CrashTrigger, **options: Any) -> bool:
    """Publish until a trigger kills the publisher; return whether it did.

    Args:
        options: as for `PublisherTestbed.publish`.
    """
    store, state = testbed.store, testbed.state
    crashing_stores: Any = [CrashingStore(inner, trigger) for inner in (store, state)]
    testbed.store, testbed.state = crashing_stores
    with trio.CancelScope() as scope:
        trigger.crash = cancelling(scope)
        await testbed.publish(**options)
    testbed.store, testbed.state = store, state
    return trigger.has_fired


async def killed_at(testbed: PublisherTestbed, operation: int, seconds: float, *, after: bool, **options: Any) -> bool:
    """Publish, and kill the publisher before or after one of its puts and deletes, counted from 0 over store and state.

    Returns:
        Whether there were as many puts and deletes.
    """
    return await publish_with(testbed, CrashTrigger(changes, operation, after), seconds=seconds, **options)


async def publish_until_killed(testbed: PublisherTestbed, operation: str, prefix: str, **options: Any) -> None:
    """Publish until the process is killed before an operation on a path of its state with a prefix."""
    trigger = CrashTrigger(lambda name, path: name == operation and path.startswith(prefix), 0, after=False)
    assert await publish_with(testbed, trigger, **options)
