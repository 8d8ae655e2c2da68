"""The publisher: a new key takes over the chain, and of two publishers with one key one stops."""

from dataclasses import replace

import pytest
import trio

from grailnode.observe.chain_check import verify_chain
from protocol import patch, paths
from protocol.digest import digest_weights
from protocol.errors import ChainError, ProtocolError
from roles.authority_updates import refresh_authority
from roles.ports import NotFoundError
from roles.trainer.publish.fencing import FencedError
from roles.trainer.publish.publisher import PublisherSettings
from tests.roles.publisher_testbed import SETTINGS, SUCCESSOR, LosesPatches, PublisherTestbed, copy_of, newest
from tests.support.builders.chains import TRAINER, equal
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import simulate, simulated


@simulated
async def test_a_new_key_takes_over_the_chain():
    testbed = PublisherTestbed()
    await testbed.snapshot(0, 1, 2, 3, 4, 5)
    await testbed.publish()
    node, follower = await testbed.follower()
    version, weights = await newest(node, follower)
    assert version == 5 and equal(weights, testbed.weights[5])
    await testbed.revise(1, testbed.run_id, trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await refresh_authority(node)
    with pytest.raises(NotFoundError):
        await follower.refresh()  # the old head does not count any more, and there is no new one yet
    assert follower.version_for(0) >= 0  # the follower still serves what it has verified
    await testbed.snapshot(6)
    await testbed.publish(key=SUCCESSOR)
    before, after = await testbed.head(), await testbed.head(SUCCESSOR)
    assert (after.epoch, after.version, after.revision) == (before.epoch + 1, 6, 1)
    overlap = range(max(before.base, after.base), 6)
    assert overlap and all(before.digest(version) == after.digest(version) for version in overlap)
    async for item in testbed.store.list(TRAINER.public.hex()):
        await testbed.store.delete(item.path)
    for who in ((node, follower), await testbed.follower()):
        version, weights = await newest(*who)
        assert version == 6 and equal(weights, testbed.weights[6])


@simulated
async def test_an_interrupted_migration_goes_on():
    testbed = PublisherTestbed()
    await testbed.snapshot(0, 1, 2, 3)
    await testbed.publish()
    await testbed.revise(1, testbed.run_id, trainers=(SUCCESSOR.public,))
    await testbed.snapshot(4)
    for _ in range(4):
        await testbed.publish(seconds=0.0, key=SUCCESSOR)  # killed at its first wait
    await testbed.publish(key=SUCCESSOR)
    version, weights = await newest(*await testbed.follower())
    assert version == 4 and equal(weights, testbed.weights[4])


@simulated
async def test_a_migration_without_the_old_space_says_what_is_missing():
    testbed = PublisherTestbed()
    await testbed.snapshot(0, 1)
    await testbed.publish()
    await testbed.revise(1, testbed.run_id, trainers=(SUCCESSOR.public,))
    async for item in testbed.store.list(paths.anchors(TRAINER.public)):
        await testbed.store.delete(item.path)
    with pytest.raises(ChainError, match="old key's space must stay readable"):
        await testbed.publish(key=SUCCESSOR)


@pytest.mark.parametrize(("delay", "seconds"), [(0.0, 4000.0), (0.5, 60.0), (3.0, 60.0)])
def test_of_two_publishers_with_one_key_and_one_state_one_stops(delay: float, seconds: float):
    async def scenario() -> None:
        testbed = PublisherTestbed()
        await testbed.snapshot(0, 1, 2)
        await testbed.publish()
        states = [testbed.state, await copy_of(testbed.state)]
        stopped_places: list[int] = []

        async def run(place: int) -> None:
            await trio.sleep(delay * place)
            await testbed.snapshot(3, 4, state=states[place])
            try:
                await testbed.publish(
                    seconds=seconds, expiry_offset_ms=place, state=states[place], log=Log(f"twin {place}")
                )
            except* (FencedError, ChainError):
                stopped_places.append(place)

        async with trio.open_nursery() as nursery:
            for place in range(2):
                nursery.start_soon(run, place)
        assert len(stopped_places) == 1
        version, weights = await newest(*await testbed.follower())
        assert version == 4 and equal(weights, testbed.weights[4])

    simulate(scenario)


@simulated
async def test_a_state_that_is_older_than_the_published_chain_is_refused():
    testbed = PublisherTestbed()
    await testbed.snapshot(0, 1)
    await testbed.publish()
    backup = await copy_of(testbed.state)
    await testbed.snapshot(2)
    await testbed.publish()
    with pytest.raises(ChainError, match="storage shows version 2"):
        await testbed.publish(state=backup)
    assert (await testbed.head()).version == 2


@simulated
async def test_a_state_that_differs_from_the_published_chain_is_refused():
    testbed = PublisherTestbed()
    await testbed.snapshot(0, 1)
    await testbed.publish()
    other = PublisherTestbed()
    await other.snapshot(0)
    await other.publish()
    await other.snapshot(1)
    other.weights[1] = other.weights[5]
    await other.snapshot(1)
    await other.publish()
    with pytest.raises(ChainError, match="did not publish"):
        await testbed.publish(state=other.state)


@simulated
async def test_the_head_is_renewed_at_once_when_a_trainer_restarts():
    testbed = PublisherTestbed()
    await testbed.snapshot(0)
    await testbed.publish()
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
def test_a_version_whose_patch_storage_loses_has_an_anchor_and_the_chain_verifies(
    newest_version: int, settings: PublisherSettings
):
    async def scenario() -> None:
        testbed = PublisherTestbed()
        testbed.store = LosesPatches()
        await testbed.snapshot(0, 1)
        await testbed.publish(seconds=60, settings=settings)
        testbed.store.losing = False
        await testbed.snapshot(*range(2, newest_version + 1))
        await testbed.publish(seconds=30, settings=settings)
        without_patch = [fields["version"] for fields in testbed.log.named("published") if not fields["patch_bytes"]]
        assert without_patch == [0, 1]
        assert (1 in (await testbed.head()).anchors) == (settings is SETTINGS)

        node, follower = await testbed.follower()
        version, weights = await newest(node, follower)
        assert version == newest_version
        assert equal(weights, testbed.weights[version])
        assert (await verify_chain(node, lambda line: None)).digest == digest_weights(testbed.weights[version])

    simulated(scenario)()


@pytest.mark.parametrize("profile", patch.PROFILES)
def test_patches_have_the_profile_that_is_set(profile: str):
    async def scenario() -> None:
        testbed = PublisherTestbed()
        await testbed.snapshot(0, 1, 2)
        await testbed.publish(settings=replace(SETTINGS, profile=profile, part_bytes=1 << 20))
        patches = [item.path async for item in testbed.store.list(paths.patches(TRAINER.public))]
        assert len(patches) == 2
        for path in patches:
            assert patch.summary(await testbed.store.get(path, 1 << 20)).profile == profile

    simulate(scenario)
