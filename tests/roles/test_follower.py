"""The follower against storage that lies: it takes what it can verify, and else keeps its last good version."""

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import Trust
from protocol.digest import digest_weights
from protocol.errors import ChainError, ExpiredError, ForkError, GapError, ProtocolError, RollbackError
from protocol.identity.signing import open_signed, sign
from roles.policy.follower import TRUST_PATH
from roles.ports import NotFoundError, StoreError
from tests.roles.follower_testbed import HOUR_MS, FollowerTestbed
from tests.support.builders.chains import TRAINER, Chain, change_elements, equal, small_run, small_weights
from tests.support.simulation.network import BEGIN
from tests.support.simulation.virtual_clock import simulated


@simulated
async def test_follows_the_chain_bit_for_bit():
    testbed = FollowerTestbed()
    await testbed.publish(2)
    follower = await testbed.follower()
    await follower.refresh()
    weights = await follower.rebuild(2)
    assert equal(weights.weights, testbed.chain.weights[2])
    await testbed.publish(3)
    await follower.refresh()
    weights = await follower.rebuild(5)
    assert equal(weights.weights, testbed.chain.weights[5])
    assert weights.digest == testbed.chain.signed_manifests[5].record.weights


@simulated
async def test_a_false_patch_is_replaced_by_an_anchor_and_a_missing_one_leaves_the_last_version():
    testbed = FollowerTestbed()
    await testbed.publish(1)
    follower = await testbed.follower()
    await follower.refresh()
    await follower.rebuild(1)
    await testbed.publish(1)
    await testbed.publish(1, anchor=True)
    path = testbed.patch_path(2)
    good = await testbed.store.get(path, 1 << 20)
    await testbed.store.put(path, good[:-1] + bytes([good[-1] ^ 1]))
    await follower.refresh()
    with pytest.raises(ChainError, match="not the bytes that the manifest names"):
        await follower.prefetch()
    weights = await follower.rebuild(3)  # by way of the anchor of version 3
    assert equal(weights.weights, testbed.chain.weights[3])
    assert testbed.log.named("fast-path-failed")

    await testbed.publish(1)
    await testbed.store.delete(testbed.patch_path(4))
    await follower.refresh()
    with pytest.raises(NotFoundError):
        await follower.prefetch()
    with pytest.raises(NotFoundError):
        await follower.rebuild(4)
    assert follower.newest is not None
    assert follower.newest.version == 3
    assert equal(follower.newest.weights, testbed.chain.weights[3])


@simulated
async def test_weights_other_than_the_signed_ones_are_refused():
    """The patch is the one that the manifest names; only the digest of the rebuilt weights differs."""
    testbed = FollowerTestbed()
    await testbed.publish(1)
    false_record = testbed.chain.signed_manifests[1].record.model_copy(update={"weights": b"\0" * 32})
    false_manifest = open_signed(sign(false_record, TRAINER), Manifest, [TRAINER.public])
    await testbed.store.put(paths.manifest(TRAINER.public, 1, false_manifest.digest), false_manifest.data)
    testbed.chain.signed_manifests[1] = false_manifest
    await testbed.chain.write_head()
    follower = await testbed.follower()
    await follower.refresh()
    with pytest.raises(ChainError, match="not those that the trainer signed"):
        await follower.rebuild(1)
    assert equal((await follower.rebuild(0)).weights, testbed.genesis)


@simulated
async def test_an_older_head_is_refused_even_after_a_restart():
    testbed = FollowerTestbed()
    await testbed.publish(3)
    follower = await testbed.follower()
    await follower.refresh()
    await testbed.chain.write_head(newest=1)  # storage shows yesterday's head
    with pytest.raises(RollbackError):
        await follower.refresh()
    restarted = await testbed.follower()
    with pytest.raises(RollbackError):
        await restarted.refresh()
    await testbed.chain.write_head()
    await restarted.refresh()
    assert restarted.chain.trust == follower.chain.trust


@simulated
async def test_two_histories_of_one_version_are_a_fork():
    testbed = FollowerTestbed()
    await testbed.publish(2)
    follower = await testbed.follower()
    await follower.refresh()
    other = Chain(testbed.run_id, testbed.store, int(BEGIN * 1000) + HOUR_MS)
    await other.publish(testbed.genesis)
    await other.publish(change_elements(testbed.genesis, 77))
    await other.publish(change_elements(testbed.genesis, 78))
    with pytest.raises(ForkError):
        await follower.refresh()
    assert equal((await follower.rebuild(2)).weights, testbed.chain.weights[2])


@simulated
async def test_an_expired_head_is_refused():
    testbed = FollowerTestbed()
    await testbed.publish(1)
    follower = await testbed.follower()
    await follower.refresh()
    await trio.sleep(HOUR_MS / 1000 + 1)
    with pytest.raises(ExpiredError):
        await follower.refresh()


@simulated
async def test_trust_is_on_disk_before_it_is_used():
    testbed = FollowerTestbed()
    await testbed.publish(2)

    class FullDisk(MemoryStore):
        async def put(self, path: str, data: bytes) -> None:
            raise StoreError("no space left on device")

    testbed.state = FullDisk()
    follower = await testbed.follower()
    with pytest.raises(StoreError):
        await follower.refresh()
    assert follower.chain.trust is None
    with pytest.raises(GapError):
        await follower.rebuild(2)


@simulated
async def test_damaged_trust_stops_the_node():
    testbed = FollowerTestbed()
    await testbed.state.put(TRUST_PATH, b"rubbish")
    with pytest.raises(ProtocolError):
        await testbed.follower()


@simulated
async def test_a_missing_manifest_leaves_the_chain_as_it_was():
    testbed = FollowerTestbed()
    await testbed.publish(1)
    follower = await testbed.follower()
    await follower.refresh()
    await testbed.publish(1)
    await testbed.store.delete(paths.manifest(TRAINER.public, 2, testbed.chain.signed_manifests[2].digest))
    with pytest.raises(NotFoundError):
        await follower.refresh()
    assert follower.version_for(1) == 1
    trust = Trust.from_bytes(await testbed.state.get(TRUST_PATH, 1 << 20))
    assert trust.version == 1


@simulated
async def test_an_anchor_of_another_model_is_refused():
    testbed = FollowerTestbed()
    testbed.run_id, testbed.run = small_run(digest_weights(small_weights(1)))
    testbed.chain = Chain(testbed.run_id, testbed.store, int(BEGIN * 1000) + HOUR_MS)
    await testbed.chain.publish(testbed.genesis)
    follower = await testbed.follower()
    with pytest.raises(ChainError, match="genesis"):
        await follower.refresh()


@simulated
async def test_an_invalid_head_is_refused_and_the_next_valid_one_followed():
    testbed = FollowerTestbed()
    await testbed.publish(1)
    follower = await testbed.follower()
    good = await testbed.store.get(paths.head(TRAINER.public), 1 << 20)
    for invalid in (b"", b"\xc1", good[:-1], good + b"\0", bytes(1000)):
        await testbed.store.put(paths.head(TRAINER.public), invalid)
        with pytest.raises(ProtocolError):
            await follower.refresh()
    await testbed.store.put(paths.head(TRAINER.public), good)
    await follower.refresh()
    assert (await follower.rebuild(1)).version == 1
