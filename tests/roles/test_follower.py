"""The follower against storage that lies: it takes what it can verify, and else keeps its last good version."""

from collections.abc import Awaitable, Callable

import pytest
import torch
import trio
from trio.testing import MockClock

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import Trust
from protocol.digest import Weights, digest_weights
from protocol.errors import ChainError, ExpiredError, ForkError, GapError, ProtocolError, RollbackError
from protocol.identity.signing import open_signed, sign
from roles.policy.follower import TRUST_PATH, Follower
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.builders.chains import TRAINER, Chain, changed, make_node, small_run, small_weights
from tests.support.simulation.network import BEGIN, Log

HOUR_MS = 3_600_000


class Site:
    """A store with a chain, and a miner's node that follows it."""

    def __init__(self) -> None:
        self.store, self.state, self.log = MemoryStore(), MemoryStore(), Log("miner")
        self.genesis = small_weights(0)
        self.run_id, self.run = small_run(digest_weights(self.genesis))
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)

    async def publish(self, count: int, **options: bool) -> None:
        """Publish version 0 if there is none, then `count` more versions."""
        if not self.chain.signed:
            await self.chain.publish(self.genesis)
        for _ in range(count):
            await self.chain.publish(changed(self.chain.weights[-1], len(self.chain.weights)), **options)

    async def follower(self, store: ObjectStore | None = None) -> Follower:
        return await Follower.open(make_node(self.run_id, self.run, store or self.store, self.state, self.log))

    def patch_path(self, version: int) -> str:
        ref = self.chain.signed[version].record.patch
        assert ref is not None
        return paths.patch(TRAINER.public, ref.object.digest)


def equal(first: Weights, second: Weights) -> bool:
    """Return whether two sets of weights are equal bit for bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.int16), second[name].view(torch.int16)) for name in first
    )


def simulated(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs a scenario on a virtual clock."""

    def test() -> None:
        trio.run(scenario, clock=MockClock(autojump_threshold=0))

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


@simulated
async def test_follows_the_chain_bit_for_bit():
    site = Site()
    await site.publish(2)
    follower = await site.follower()
    await follower.refresh()
    weights = await follower.rebuild(2)
    assert equal(weights.weights, site.chain.weights[2])
    await site.publish(3)
    await follower.refresh()
    weights = await follower.rebuild(5)
    assert equal(weights.weights, site.chain.weights[5])
    assert weights.digest == site.chain.signed[5].record.weights


@simulated
async def test_a_false_patch_is_replaced_by_an_anchor_and_a_missing_one_leaves_the_last_version():
    site = Site()
    await site.publish(1)
    follower = await site.follower()
    await follower.refresh()
    await follower.rebuild(1)
    await site.publish(1)
    await site.publish(1, anchor=True)
    path = site.patch_path(2)
    good = await site.store.get(path, 1 << 20)
    await site.store.put(path, good[:-1] + bytes([good[-1] ^ 1]))
    await follower.refresh()
    with pytest.raises(ChainError, match="not the bytes that the manifest names"):
        await follower.prefetch()
    weights = await follower.rebuild(3)  # by way of the anchor of version 3
    assert equal(weights.weights, site.chain.weights[3])
    assert site.log.named("fast-path-failed")

    await site.publish(1)
    await site.store.delete(site.patch_path(4))
    await follower.refresh()
    with pytest.raises(NotFoundError):
        await follower.prefetch()
    with pytest.raises(NotFoundError):
        await follower.rebuild(4)
    assert follower.newest is not None
    assert follower.newest.version == 3
    assert equal(follower.newest.weights, site.chain.weights[3])


@simulated
async def test_weights_other_than_the_signed_ones_are_refused():
    """The patch is the one that the manifest names; only the digest of the rebuilt weights differs."""
    site = Site()
    await site.publish(1)
    false_record = site.chain.signed[1].record.model_copy(update={"weights": b"\0" * 32})
    false_manifest = open_signed(sign(false_record, TRAINER), Manifest, [TRAINER.public])
    await site.store.put(paths.manifest(TRAINER.public, 1, false_manifest.digest), false_manifest.data)
    site.chain.signed[1] = false_manifest
    await site.chain.write_head()
    follower = await site.follower()
    await follower.refresh()
    with pytest.raises(ChainError, match="not those that the trainer signed"):
        await follower.rebuild(1)
    assert equal((await follower.rebuild(0)).weights, site.genesis)


@simulated
async def test_an_older_head_is_refused_even_after_a_restart():
    site = Site()
    await site.publish(3)
    follower = await site.follower()
    await follower.refresh()
    await site.chain.write_head(newest=1)  # storage shows yesterday's head
    with pytest.raises(RollbackError):
        await follower.refresh()
    restarted = await site.follower()
    with pytest.raises(RollbackError):
        await restarted.refresh()
    await site.chain.write_head()
    await restarted.refresh()
    assert restarted.chain.trust == follower.chain.trust


@simulated
async def test_two_histories_of_one_version_are_a_fork():
    site = Site()
    await site.publish(2)
    follower = await site.follower()
    await follower.refresh()
    other = Chain(site.run_id, site.store, int(BEGIN * 1000) + HOUR_MS)
    await other.publish(site.genesis)
    await other.publish(changed(site.genesis, 77))
    await other.publish(changed(site.genesis, 78))
    with pytest.raises(ForkError):
        await follower.refresh()
    assert equal((await follower.rebuild(2)).weights, site.chain.weights[2])


@simulated
async def test_an_expired_head_is_refused():
    site = Site()
    await site.publish(1)
    follower = await site.follower()
    await follower.refresh()
    await trio.sleep(HOUR_MS / 1000 + 1)
    with pytest.raises(ExpiredError):
        await follower.refresh()


@simulated
async def test_trust_is_on_disk_before_it_is_used():
    site = Site()
    await site.publish(2)

    class FullDisk(MemoryStore):
        async def put(self, path: str, data: bytes) -> None:
            raise StoreError("no space left on device")

    site.state = FullDisk()
    follower = await site.follower()
    with pytest.raises(StoreError):
        await follower.refresh()
    assert follower.chain.trust is None
    with pytest.raises(GapError):
        await follower.rebuild(2)


@simulated
async def test_damaged_trust_stops_the_node():
    site = Site()
    await site.state.put(TRUST_PATH, b"rubbish")
    with pytest.raises(ProtocolError):
        await site.follower()


@simulated
async def test_a_missing_manifest_leaves_the_chain_as_it_was():
    site = Site()
    await site.publish(1)
    follower = await site.follower()
    await follower.refresh()
    await site.publish(1)
    await site.store.delete(paths.manifest(TRAINER.public, 2, site.chain.signed[2].digest))
    with pytest.raises(NotFoundError):
        await follower.refresh()
    assert follower.version_for(1) == 1
    trust = Trust.from_bytes(await site.state.get(TRUST_PATH, 1 << 20))
    assert trust.version == 1


@simulated
async def test_an_anchor_of_another_model_is_refused():
    site = Site()
    site.run_id, site.run = small_run(digest_weights(small_weights(1)))
    site.chain = Chain(site.run_id, site.store, int(BEGIN * 1000) + HOUR_MS)
    await site.chain.publish(site.genesis)
    follower = await site.follower()
    with pytest.raises(ChainError, match="genesis"):
        await follower.refresh()


@simulated
async def test_an_invalid_head_is_refused_and_the_next_valid_one_followed():
    site = Site()
    await site.publish(1)
    follower = await site.follower()
    good = await site.store.get(paths.head(TRAINER.public), 1 << 20)
    for invalid in (b"", b"\xc1", good[:-1], good + b"\0", bytes(1000)):
        await site.store.put(paths.head(TRAINER.public), invalid)
        with pytest.raises(ProtocolError):
            await follower.refresh()
    await site.store.put(paths.head(TRAINER.public), good)
    await follower.refresh()
    assert (await follower.rebuild(1)).version == 1
