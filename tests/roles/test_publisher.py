"""The publisher: a new key takes over the chain, and of two publishers with one key one stops."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from grailnode.observe.chain_check import verify_chain
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head
from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError, ProtocolError
from protocol.identity.authority import Authority
from protocol.identity.signing import SigningKey, open_announced, sign
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import NotFoundError
from roles.trainer.publish.fencing import FencedError
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.spool import SnapshotName, put_snapshot
from tests.roles.test_follower import equal
from tests.support.builders.chains import TRAINER, changed, make_node, small_run, small_weights
from tests.support.builders.samples import revision
from tests.support.simulation.network import BEGIN, Log, key
from tests.support.simulation.trio_clock import TrioClock

SUCCESSOR = SigningKey(b"s" * 32)
SETTINGS = PublisherSettings(anchor_interval=2, keep_patches=3, keep_anchors=2, takeover_seconds=1.0)


def simulated(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs a scenario on a virtual clock."""

    def test() -> None:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))

    test.__name__ = scenario.__name__
    return test


async def copy_of(store: MemoryStore) -> MemoryStore:
    """Return another store with the same objects."""
    copy = MemoryStore()
    async for item in store.list(""):
        await copy.put(item.path, await store.get(item.path, 1 << 30))
    return copy


class Site:
    """A store, a trainer's state, and the weights of its versions."""

    def __init__(self) -> None:
        self.store, self.state, self.log = MemoryStore(), MemoryStore(), Log("trainer")
        self.weights: list[Weights] = [small_weights(0)]
        for seed in range(1, 12):
            self.weights.append(changed(self.weights[-1], seed))
        self.run_id, self.run = small_run(digest_weights(self.weights[0]))
        self.clock = TrioClock(BEGIN)

    def node(self, key: SigningKey = TRAINER, state: MemoryStore | None = None, log: Log | None = None) -> Node:
        return make_node(self.run_id, self.run, self.store, state or self.state, log or self.log, key, clock=self.clock)

    async def snapshot(self, *versions: int, state: MemoryStore | None = None) -> None:
        for version in versions:
            await put_snapshot(state or self.state, SnapshotName(version, version), self.weights[version])

    async def publish(
        self, seconds: float = 5.0, expiry_offset_ms: int = 0, settings: PublisherSettings = SETTINGS, **options: Any
    ) -> None:
        """Run a publisher for some seconds."""
        node = self.node(**options)
        await refresh_authority(node)
        with trio.move_on_after(seconds):
            await Publisher(
                node, await History.open(node.state), replace(settings, expiry_offset_ms=expiry_offset_ms)
            ).run()

    async def follower(self, state: MemoryStore | None = None) -> tuple[Node, Follower]:
        node = make_node(self.run_id, self.run, self.store, state or MemoryStore(), Log("miner"), clock=self.clock)
        await refresh_authority(node)
        return node, await Follower.open(node)

    async def revise(self, number: int, previous: bytes, **changes: Any) -> None:
        authority = Authority(**(dict(self.run.authority) | changes))
        record = revision(number, previous, run=self.run_id, authority=authority)
        await self.store.put(paths.revision(self.run_id, number), sign(record, key("root")))

    async def head(self, key: SigningKey = TRAINER) -> Head:
        return open_announced(await self.store.get(paths.head(key.public), 1 << 20), Head).record


async def newest(node: Node, follower: Follower) -> tuple[int, Weights]:
    """Return the newest version and its weights, as a follower verifies them."""
    await refresh_authority(node)
    await follower.refresh()
    assert follower.chain.head is not None
    verified = await follower.rebuild(follower.chain.head.version)
    return verified.version, verified.weights


@simulated
async def test_a_new_key_takes_over_the_chain():
    site = Site()
    await site.snapshot(0, 1, 2, 3, 4, 5)
    await site.publish()
    node, follower = await site.follower()
    version, weights = await newest(node, follower)
    assert version == 5 and equal(weights, site.weights[5])
    await site.revise(1, site.run_id, trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await refresh_authority(node)
    with pytest.raises(NotFoundError):
        await follower.refresh()  # the old head does not count any more, and there is no new one yet
    assert follower.version_for(0) >= 0  # the follower still serves what it has verified
    await site.snapshot(6)
    await site.publish(key=SUCCESSOR)
    before, after = await site.head(), await site.head(SUCCESSOR)
    assert (after.epoch, after.version, after.revision) == (before.epoch + 1, 6, 1)
    overlap = range(max(before.base, after.base), 6)
    assert overlap and all(before.digest(version) == after.digest(version) for version in overlap)
    async for item in site.store.list(TRAINER.public.hex()):
        await site.store.delete(item.path)
    for who in ((node, follower), await site.follower()):
        version, weights = await newest(*who)
        assert version == 6 and equal(weights, site.weights[6])


@simulated
async def test_an_interrupted_migration_goes_on():
    site = Site()
    await site.snapshot(0, 1, 2, 3)
    await site.publish()
    await site.revise(1, site.run_id, trainers=(SUCCESSOR.public,))
    await site.snapshot(4)
    for _ in range(4):
        await site.publish(seconds=0.0, key=SUCCESSOR)  # killed at its first wait
    await site.publish(key=SUCCESSOR)
    version, weights = await newest(*await site.follower())
    assert version == 4 and equal(weights, site.weights[4])


@simulated
async def test_a_migration_without_the_old_space_says_what_is_missing():
    site = Site()
    await site.snapshot(0, 1)
    await site.publish()
    await site.revise(1, site.run_id, trainers=(SUCCESSOR.public,))
    async for item in site.store.list(paths.anchors(TRAINER.public)):
        await site.store.delete(item.path)
    with pytest.raises(ChainError, match="old key's space must stay readable"):
        await site.publish(key=SUCCESSOR)


@pytest.mark.parametrize(("delay", "seconds"), [(0.0, 4000.0), (0.5, 60.0), (3.0, 60.0)])
def test_of_two_publishers_with_one_key_and_one_state_one_stops(delay: float, seconds: float):
    async def scenario() -> None:
        site = Site()
        await site.snapshot(0, 1, 2)
        await site.publish()
        states = [site.state, await copy_of(site.state)]
        stopped_places: list[int] = []

        async def run(place: int) -> None:
            await trio.sleep(delay * place)
            await site.snapshot(3, 4, state=states[place])
            try:
                await site.publish(
                    seconds=seconds, expiry_offset_ms=place, state=states[place], log=Log(f"twin {place}")
                )
            except* (FencedError, ChainError):
                stopped_places.append(place)

        async with trio.open_nursery() as nursery:
            for place in range(2):
                nursery.start_soon(run, place)
        assert len(stopped_places) == 1
        version, weights = await newest(*await site.follower())
        assert version == 4 and equal(weights, site.weights[4])

    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@simulated
async def test_a_state_that_is_older_than_the_published_chain_is_refused():
    site = Site()
    await site.snapshot(0, 1)
    await site.publish()
    backup = await copy_of(site.state)
    await site.snapshot(2)
    await site.publish()
    with pytest.raises(ChainError, match="storage shows version 2"):
        await site.publish(state=backup)
    assert (await site.head()).version == 2


@simulated
async def test_a_state_that_differs_from_the_published_chain_is_refused():
    site = Site()
    await site.snapshot(0, 1)
    await site.publish()
    other = Site()
    await other.snapshot(0)
    await other.publish()
    await other.snapshot(1)
    other.weights[1] = other.weights[5]
    await other.snapshot(1)
    await other.publish()
    with pytest.raises(ChainError, match="did not publish"):
        await site.publish(state=other.state)


@simulated
async def test_the_head_is_renewed_at_once_when_a_trainer_restarts():
    site = Site()
    await site.snapshot(0)
    await site.publish()
    _, follower = await site.follower()
    await trio.sleep(2 * site.run.head_ttl)
    with pytest.raises(ProtocolError, match="has expired"):
        await follower.refresh()
    await site.publish()
    await follower.refresh()
    assert follower.version_for(5) == 0


class LosesPatches(MemoryStore):
    """Storage that acknowledges patches and does not store them while `losing` is True."""

    losing = True

    async def put(self, path: str, data: bytes) -> None:
        if not (self.losing and "/patches/" in path):
            await super().put(path, data)


@pytest.mark.parametrize(
    ("newest_version", "settings"),
    [
        (3, SETTINGS),
        (9, replace(SETTINGS, anchor_interval=4, keep_patches=100, keep_anchors=1)),  # version 1 has no patch or anchor
    ],
)
def test_a_version_whose_patch_storage_loses_has_an_anchor_and_the_chain_verifies(
    newest_version: int, settings: PublisherSettings
):
    async def scenario() -> None:
        site = Site()
        site.store = LosesPatches()
        await site.snapshot(0, 1)
        await site.publish(seconds=60, settings=settings)
        site.store.losing = False
        await site.snapshot(*range(2, newest_version + 1))
        await site.publish(seconds=30, settings=settings)
        without_patch = [fields["version"] for fields in site.log.named("published") if not fields["patch_bytes"]]
        assert without_patch == [0, 1]
        assert (1 in (await site.head()).anchors) == (settings is SETTINGS)

        node, follower = await site.follower()
        version, weights = await newest(node, follower)
        assert version == newest_version
        assert equal(weights, site.weights[version])
        assert (await verify_chain(node, lambda line: None)).digest == digest_weights(site.weights[version])

    simulated(scenario)()
