"""The publisher: builds of versions, a new key that takes over the chain, and two publishers with one key."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import blake3 as blake3_module
import pytest
import torch
import trio

from grailnode.observe.chain_check import verify_chain
from grailnode.store.memory import MemoryStore
from protocol import digest, patch, paths
from protocol.digest import digest_weights, tensor_digest
from protocol.errors import ChainError, PatchError, ProtocolError
from protocol.patch import PatchEncoder, applying, codec
from roles.authority_updates import refresh_authority
from roles.ports import FencedError, NotFoundError
from roles.trainer.publish.host_files import VersionWeights, build_patch
from roles.trainer.publish.publisher import PublisherSettings
from roles.trainer.tensor_shards import WeightsHash
from tests.roles.publisher_testbed import SETTINGS, SUCCESSOR, LosesPatches, PublisherTestbed, killed_at, published
from tests.support.builders.chains import TRAINER, small_weights
from tests.support.measuring import store_listing
from tests.support.measuring.store_listing import copy_objects, names_below
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import Log


async def test_a_new_key_takes_over_the_chain():
    testbed = await published(6)
    node, follower = await testbed.follower()
    await testbed.assert_followed(5, follower=(node, follower))
    await testbed.revise(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await refresh_authority(node)
    with pytest.raises(NotFoundError):
        await follower.refresh()  # the old head does not count any more, and there is no new one yet
    assert follower.version_for(0) >= 0  # the follower still serves what it has verified
    await testbed.publish(6, key=SUCCESSOR)
    before, after = await testbed.head(), await testbed.head(SUCCESSOR)
    assert (after.epoch, after.version, after.revision) == (before.epoch + 1, 6, 1)
    overlap = range(max(before.base, after.base), 6)
    assert overlap and all(before.digest(version) == after.digest(version) for version in overlap)
    async for item in testbed.store.list(TRAINER.public.hex()):
        await testbed.store.delete(item.path)
    for who in ((node, follower), None):
        await testbed.assert_followed(6, follower=who)


async def test_a_migration_without_the_old_space_says_what_is_missing():
    testbed = await published(2)
    await testbed.revise(trainers=(SUCCESSOR.public,))
    async for item in testbed.store.list(paths.kind_prefix(TRAINER.public, "anchors")):
        await testbed.store.delete(item.path)
    with pytest.raises(ChainError, match="old key's space must stay readable"):
        await testbed.publish(key=SUCCESSOR)


@pytest.mark.parametrize(("delay", "seconds"), [(0.0, 4000.0), (0.5, 60.0), (3.0, 60.0)])
async def test_of_two_publishers_with_one_key_and_one_state_one_stops(delay: float, seconds: float):
    testbed = await published(3)
    states = [testbed.state, await copy_objects(testbed.state, MemoryStore())]
    stopped_places: list[int] = []
    logs = [Log("twin 0"), Log("twin 1")]
    settings = replace(SETTINGS, poll_seconds=0.5)

    async def run(place: int) -> None:
        await trio.sleep(delay * place)
        await testbed.snapshot(3, 4, state=states[place])
        try:
            await testbed.publish(
                seconds=seconds, expiry_offset_ms=place, state=states[place], log=logs[place], settings=settings
            )
        except* (FencedError, ChainError):
            stopped_places.append(place)

    async with trio.open_nursery() as nursery:
        for place in range(2):
            nursery.start_soon(run, place)
    assert len(stopped_places) == 1
    assert delay or any(log.named("epoch-contested") for log in logs)
    await testbed.assert_followed(4)


async def test_a_state_that_differs_from_the_published_chain_is_refused():
    testbed = await published(2)
    other = PublisherTestbed()
    await other.publish(0)
    other.weights[1] = other.weights[5]
    await other.publish(1)
    with pytest.raises(ChainError, match="did not publish"):
        await testbed.publish(state=other.state)


async def test_the_head_is_renewed_at_once_when_a_trainer_restarts():
    testbed = await published(1)
    _, follower = await testbed.follower()
    await trio.sleep(2 * testbed.run.head_ttl)
    with pytest.raises(ProtocolError, match="has expired"):
        await follower.refresh()
    await testbed.publish()
    await follower.refresh()
    assert follower.version_for(5) == 0


@pytest.mark.parametrize(
    ("newest_version", "settings"),
    [
        (3, SETTINGS),
        (9, replace(SETTINGS, anchor_interval=4, keep_patches=100, keep_anchors=1)),  # version 1 has no patch or anchor
    ],
)
async def test_a_version_whose_patch_storage_loses_has_an_anchor_and_the_chain_verifies(
    newest_version: int, settings: PublisherSettings
):
    testbed = PublisherTestbed()
    testbed.store = LosesPatches()
    await testbed.publish(0, 1, seconds=60, settings=settings)
    testbed.store.losing = False
    await testbed.publish(*range(2, newest_version + 1), seconds=30, settings=settings)
    without_patch = [fields["version"] for fields in testbed.log.named("published") if not fields["patch_bytes"]]
    assert without_patch == [0, 1]
    assert (1 in (await testbed.head()).anchors) == (settings is SETTINGS)
    node, follower = await testbed.follower()
    await testbed.assert_followed(newest_version, follower=(node, follower))
    assert (await verify_chain(node, lambda line: None)).digest == digest_weights(testbed.weights[newest_version])


async def test_a_version_has_an_anchor_as_soon_as_the_patches_since_the_last_one_are_larger():
    testbed = PublisherTestbed()
    testbed.weights = [small_weights(version) for version in range(12)]  # every element changes
    settings = replace(SETTINGS, anchor_interval=100, keep_patches=100, keep_anchors=1)
    for version in range(12):  # one at a time: an anchor that is being uploaded delays the next one
        await testbed.publish(version, settings=settings)
    node, follower = await testbed.follower()
    await testbed.assert_followed(11, follower=(node, follower))
    manifests = [follower.chain.manifest(version) for version in range(12)]
    sizes = [manifest.patch.size for manifest in manifests if manifest.patch]
    nbytes = sum(tensor.nbytes for tensor in testbed.weights[0].values())
    expected, since = [], 0
    for version, size in enumerate(sizes, start=1):
        since += size
        if since >= nbytes:
            expected.append(version)
            since = 0
    assert len(expected) > 2
    assert [version for version, manifest in enumerate(manifests) if manifest.anchor] == [0, *expected]


@pytest.mark.parametrize("profile", patch.PROFILES)
async def test_patches_have_the_profile_that_is_set(profile: str):
    testbed = PublisherTestbed()
    await testbed.publish(0, 1, 2, settings=replace(SETTINGS, profile=profile, part_bytes=1 << 20))
    patches = await store_listing.paths(testbed.store, paths.kind_prefix(TRAINER.public, "patches"))
    assert len(patches) == 2
    for path in patches:
        assert patch.summary(await testbed.store.get(path, 1 << 20)).profile == profile


# A version's patch on its way from the snapshot to the store: each tensor is hashed once, by whoever comes first


TENSOR_BYTES = 64 * 64 * 2


class CountingHasher:
    """BLAKE3 that notes the size of everything that is hashed."""

    AUTO = blake3_module.blake3.AUTO
    sizes: list[int]

    def __init__(self, data: Any = b"", **options: Any) -> None:
        self._hasher = blake3_module.blake3(data, **options)
        self._size = len(memoryview(data).cast("B"))

    def update(self, data: Any) -> "CountingHasher":
        self._hasher.update(data)
        self._size += len(memoryview(data).cast("B"))
        return self

    def digest(self) -> bytes:
        self.sizes.append(self._size)
        return self._hasher.digest()


@pytest.fixture
def hashed_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes under each digest that is computed during a test."""
    CountingHasher.sizes = []
    for module in (digest, codec, applying):
        monkeypatch.setattr(module, "blake3", CountingHasher)
    yield CountingHasher.sizes


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(64, 64, generator=generator).bfloat16() for name in "abc"}


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_every_tensor_is_hashed_once_on_its_way_to_a_patch(hashed_sizes: list[int], profile: str) -> None:
    old = weights(0)
    before = {name: tensor_digest(tensor) for name, tensor in old.items()}
    base = digest_weights(old)
    new = old | {name: tensor * 1.01 for name, tensor in old.items() if name != "b"}
    hashed_sizes.clear()
    encoder, own = PatchEncoder(profile), WeightsHash()
    for name in "abc":  # each in a file of its own, as `HostFiles` has them
        own.add({name: new[name]})
        encoder.add({name: old[name]}, {name: new[name]}, base_digests=before, digests=own.digests)
        patch.check_frames({name: old[name]}, {name: new[name]}, encoder.tensors)
    data = build_patch(encoder.tensors, profile, base)
    assert sum(tensor.row.changed for tensor in encoder.tensors.values()) == patch.summary(data).changed > 0
    assert sum(size == TENSOR_BYTES for size in hashed_sizes) == 3
    assert max(hashed_sizes) == TENSOR_BYTES  # the others are tables of digests
    assert sum(hashed_sizes) < 3.5 * TENSOR_BYTES
    after = VersionWeights.of(encoder.tensors)
    assert own.digests == {name: tensor_digest(tensor) for name, tensor in new.items()}
    assert after.digest == digest_weights(new)
    assert sum(tensor.nbytes for tensor in after.outline.values()) == 3 * TENSOR_BYTES
    assert patch.apply(old, data).keys() == new.keys()  # its tensors share no frame, as those of one file would
    assert digest_weights(patch.apply(old, data)) == after.digest


def test_a_fault_of_the_codec_is_found_before_the_patch_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, other = (weights(seed) for seed in range(3))
    encoder = PatchEncoder("compact")
    encoder.add(old, new)
    with pytest.raises(PatchError):
        patch.check_frames(old, other, encoder.tensors)
    wrong_patch = patch.encode(old, other)
    monkeypatch.setattr(codec, "write_container", lambda *parts: wrong_patch)
    with pytest.raises(PatchError):
        build_patch(encoder.tensors, "compact", digest_weights(old))


# A trainer that moves to a new key and is killed before or after any put or delete: the chain moves along, and
# followers see one history


SECONDS = 2.5  # of a start, which waits for less than that for another trainer under its key


class RotatedKeyTestbed(PublisherTestbed):
    """A trainer whose key has been replaced, and which has not started since."""

    async def prepare(self) -> None:
        await self.publish(0, 1, 2, 3, seconds=SECONDS)
        await self.revise(trainers=(SUCCESSOR.public,))
        await self.snapshot(4)


@pytest.mark.parametrize("after", few_daily([False, True], 2))
async def test_a_migration_that_is_killed_at_any_operation_goes_on(after: bool):
    before = RotatedKeyTestbed()
    await before.prepare()
    for operation in itertools.count():
        testbed = RotatedKeyTestbed()
        testbed.store = await copy_objects(before.store, MemoryStore())
        testbed.state = await copy_objects(before.state, MemoryStore())
        if not await killed_at(testbed, operation, SECONDS, after=after, key=SUCCESSOR):
            break
        await testbed.publish(seconds=SECONDS, key=SUCCESSOR)
        await testbed.assert_followed(4, after=operation)
        names = await names_below(testbed.store, paths.kind_prefix(SUCCESSOR.public, "manifests"))
        versions = [name.partition("-")[0] for name in names]
        assert len(versions) == len(set(versions)), f"two manifests for a version after operation {operation}"
    assert operation > 20
