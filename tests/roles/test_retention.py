"""Everything that a signed head names is in storage until the last head that names it has expired: for all settings,
anchors that complete late, kills, restarts with other settings, and new keys.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import digest_weights
from protocol.encoding import content_digest
from protocol.identity.signing import SigningKey, open_announced
from protocol.limits import MAX_CHAIN
from roles.policy.follower import Follower
from roles.trainer.publish.publisher import PublisherSettings
from roles.trainer.publish.retention import check_retention, retained_range
from tests.roles.publisher_testbed import SUCCESSOR, PublisherTestbed, killed_at
from tests.support.builders.chains import TRAINER, change_elements, make_node, small_run, small_weights
from tests.support.builders.snapshots import put_snapshot
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import running, simulate

HEAD_TTL = 20  # seconds
SETTINGS = PublisherSettings(takeover_seconds=0.1, poll_seconds=1.0, part_bytes=1)


class CheckingStore(MemoryStore):
    """A store that checks the invariant at every put of a head and at every delete.

    Attributes:
        violations: one line for each head that was put and names a missing object, and for each object that was deleted
            while a head that names it was valid.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manifests: dict[bytes, Manifest] = {}
        self.expiries: dict[str, float] = {}  # by path, when the last head that names it expires (Unix time, seconds)
        self.violations: list[str] = []

    def now(self) -> float:
        return BEGIN + trio.current_time()

    async def put(self, path: str, data: bytes) -> None:
        if path.endswith("/head"):
            signed = open_announced(data, Head)
            for name in self._names(signed.record, signed.signers[0]):
                if not await self.has(name):
                    self.violations.append(
                        f"a head of version {signed.record.version} names {name}, which is not there"
                    )
                self.expiries[name] = max(self.expiries.get(name, 0.0), signed.record.expires_ms / 1000)
        if "/manifests/" in path:
            manifest = open_announced(data, Manifest)
            self.manifests[manifest.digest] = manifest.record
        await super().put(path, data)

    async def delete(self, path: str) -> None:
        if self.expiries.get(path, 0.0) > self.now():
            self.violations.append(
                f"{path} was deleted, {self.expiries[path] - self.now():.0f} s before its head expires"
            )
        await super().delete(path)

    async def has(self, path: str) -> bool:
        return bool([item async for item in self.list(path) if item.path == path])

    def _names(self, head: Head, trainer: bytes) -> list[str]:
        names = []
        for version, digest in enumerate(head.manifests, head.base):
            manifest = self.manifests[digest]
            names.append(paths.manifest(trainer, version, digest))
            if manifest.patch is not None and version >= head.oldest_patch:
                names += [paths.patch(trainer, part.digest) for part in manifest.patch.parts]
            if version in head.anchors:
                names += [paths.anchor(trainer, shard.digest) for shard in manifest.anchor]
        return names


class LongRunTestbed(PublisherTestbed):
    """A trainer with a given number of versions, heads that expire soon, and a store that checks the invariant."""

    def __init__(self, versions: int) -> None:
        super().__init__()
        self.weights = [small_weights(0)]
        for seed in range(1, versions):
            self.weights.append(change_elements(self.weights[-1], seed))
        _, run = small_run(digest_weights(self.weights[0]))
        self.run = run.model_copy(update={"head_ttl": HEAD_TTL})
        self.store: CheckingStore = CheckingStore()

    async def lose_oldest_anchor(self) -> int:
        """Lose the oldest anchor that the head names from storage; return its version."""
        head = await self.head()
        manifest = self.store.manifests[head.digest(head.anchors[0])]
        await MemoryStore.delete(self.store, paths.anchor(TRAINER.public, manifest.anchor[0].digest))
        return head.anchors[0]


@pytest.mark.parametrize(
    ("interval", "patches", "anchors"),
    [
        (6, 100, 10),
        (1, 100, 10),
        (25, 100, 3),
        (50, 200, 2),
        (9, 100, 10),
        (50, 100, 10),
        (48, 1950, 42),  # the largest settings that are accepted
        *product((1, 2, 3, 7, 20), (1, 2, 5, 19, 60), (1, 2, 5, 11)),
    ],
)
def test_a_retired_anchor_is_never_named_again(interval: int, patches: int, anchors: int) -> None:
    check_retention(interval, patches, anchors)
    available: set[int] = set()
    first_patch = 0
    for newest_version in range(5 * (patches + interval * anchors)):
        if newest_version % interval == 0:
            available.add(newest_version)
        anchors_named, oldest_patch = retained_range(newest_version, available, first_patch, patches, anchors)
        assert set(anchors_named) <= available
        assert oldest_patch >= first_patch
        assert oldest_patch - 1 in anchors_named
        assert {version for version in available if version > newest_version - interval * anchors} <= set(anchors_named)
        assert newest_version - anchors_named[0] < MAX_CHAIN
        assert newest_version - oldest_patch < patches + interval + max(1, patches // anchors)
        assert len(anchors_named) <= 2 * anchors + 4
        available, first_patch = set(anchors_named), oldest_patch


@given(st.randoms(use_true_random=False))
def test_retired_anchors_are_never_named_again_whichever_complete_late(chance: random.Random) -> None:
    available: set[int] = {0}
    unfinished: set[int] = set()
    first_patch = 0
    for newest_version in range(1, 150):
        if chance.random() < 0.3:
            unfinished.add(newest_version)
        for version in list(unfinished):
            if chance.random() < 0.2:
                unfinished.discard(version)
                available.add(version)
        patches, anchors = chance.choice([1, 3, 10, 50]), chance.choice([1, 2, 5])  # as if started with other settings
        anchors_named, oldest_patch = retained_range(newest_version, available, first_patch, patches, anchors)
        assert set(anchors_named) <= available
        assert oldest_patch >= first_patch
        assert oldest_patch - 1 in anchors_named
        available, first_patch = set(anchors_named), oldest_patch


@pytest.mark.parametrize(
    ("interval", "patches", "anchors", "word"),
    [(4000, 200, 1, "anchor_interval"), (50, 5000, 10, "keep_patches"), (100, 100, 50, "keep_anchors")],
)
def test_settings_for_more_versions_than_a_head_can_list_are_refused(
    interval: int, patches: int, anchors: int, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        check_retention(interval, patches, anchors)


async def run_schedule(seed: int) -> None:
    """Run a random schedule: the settings of each start, at which operation it is killed, and how long it is down."""
    chance = random.Random(seed)
    testbed = LongRunTestbed(30)
    trainer: SigningKey = TRAINER
    published_version = 0
    while published_version < 29:
        settings = replace(
            SETTINGS,
            anchor_interval=chance.choice([1, 2, 3, 6]),
            keep_patches=chance.choice([1, 3, 10]),
            keep_anchors=chance.choice([1, 2, 4]),
        )
        versions = range(published_version, min(30, published_version + chance.randint(1, 8)))
        await testbed.snapshot(*versions)
        published_version = versions[-1]
        if chance.random() < 0.7:
            after = chance.random() < 0.5
            await killed_at(testbed, chance.randrange(60), 400, after=after, settings=settings, key=trainer)
        else:
            await testbed.publish(seconds=chance.choice([1, 30, 400]), settings=settings, key=trainer)
        await trio.sleep(chance.choice([0, 5, 300, 900]))
        if trainer is TRAINER and chance.random() < 0.1:
            trainer = SUCCESSOR
            await testbed.revise(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await testbed.publish(seconds=400, settings=settings, key=trainer)
    assert testbed.store.violations == []
    await testbed.assert_followed(29)


@pytest.mark.parametrize("seed", few_daily(range(25), 12))
def test_no_schedule_of_kills_and_settings_makes_a_head_name_a_missing_object(seed: int) -> None:
    simulate(run_schedule, seed)


class SlowLink(DecoratedStore):
    """A store behind a link of 1 Mbit/s."""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        await trio.sleep(len(data) / 125_000)
        return await super().get(path, max_bytes, offset=offset, size=size)  # still there when the last byte arrives


def large_weights(seed: int) -> dict[str, torch.Tensor]:
    return {"a": torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()}


async def test_no_object_is_deleted_while_a_reader_behind_a_slow_link_fetches_it() -> None:
    """An anchor takes 4 s at 1 Mbit/s. Every second a version with an anchor is published, and one anchor is kept."""
    testbed = LongRunTestbed(2)
    weights = large_weights(0)
    _, run = small_run(digest_weights(weights))
    testbed.run_id, testbed.run = content_digest(run.to_bytes()), run.model_copy(update={"head_ttl": HEAD_TTL})
    settings = replace(SETTINGS, anchor_interval=1, keep_patches=1, keep_anchors=1)

    async def train() -> None:
        nonlocal weights
        for version in range(60):
            await put_snapshot(testbed.state, version, weights)
            weights = {"a": weights["a"].roll(1, 0)}
            await trio.sleep(1)

    async with running(lambda: testbed.publish(seconds=70, settings=settings)) as nursery:
        nursery.start_soon(train)
        await trio.sleep(3)
        link, log = SlowLink(testbed.store), Log("reader")
        node = make_node(testbed.run_id, testbed.run, link, MemoryStore(), log, clock=testbed.clock)
        follower = await Follower(node).open()
        versions = []
        while trio.current_time() < 55:
            await follower.refresh()
            assert follower.chain.head is not None
            versions.append((await follower.rebuild(follower.chain.head.version)).version)
            await trio.sleep(0.1)
    assert len(versions) >= 10
    assert versions == sorted(set(versions))
    assert testbed.store.violations == []


async def test_an_anchor_that_storage_lost_is_retired_at_the_next_start() -> None:
    testbed = LongRunTestbed(8)
    settings = replace(SETTINGS, anchor_interval=2, keep_patches=4, keep_anchors=2)
    await testbed.publish(*range(6), seconds=30, settings=settings)
    lost_version = await testbed.lose_oldest_anchor()
    await testbed.publish(6, seconds=30, settings=settings)
    assert [event["version"] for event in testbed.log.named("anchor-lost")] == [lost_version]
    assert lost_version not in (await testbed.head()).anchors
    await testbed.assert_followed(6)
    assert testbed.store.violations == []


async def test_the_only_anchor_is_named_even_if_storage_does_not_show_it() -> None:
    testbed = LongRunTestbed(3)
    settings = replace(SETTINGS, anchor_interval=10)
    await testbed.publish(0, 1, seconds=5, settings=settings)
    assert await testbed.lose_oldest_anchor() == 0
    await testbed.publish(seconds=5, settings=settings)
    assert [event["retired"] for event in testbed.log.named("anchor-lost")] == [False]
    assert (await testbed.head()).anchors == (0,)
