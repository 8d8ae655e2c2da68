"""Spaces that hang, or answer with as many bytes as they may: no node waits for them or runs out of memory.

And a space with a record that another participant signed: the alarm names the signer, not the owner of the space.
"""

from itertools import count

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.errors import ForkError, ProtocolError
from roles.authority_updates import poll_authority
from roles.policy.serving import keep_fresh
from tests.attacks.hanging_store import HangingStore, follow_chain_on, make_follower_on
from tests.support.attacked_nodes.follower import SECOND, VALIDATOR, follow_chain
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER
from tests.support.simulation.virtual_clock import simulated


class JunkStore(MemoryStore):
    """Storage that answers junk for every manifest, and counts the bytes that its readers would take."""

    max_bytes = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/manifests/" in path:
            self.max_bytes += max_bytes
            return bytes(16)
        return await super().get(path, max_bytes, offset=offset, size=size)


@simulated
async def test_a_revoked_validator_does_not_delay_its_revocation_by_hanging():
    store = HangingStore(seconds=200.0)
    testbed = await follow_chain_on(store)
    await testbed.revise(validators=(SECOND.public,), revoked=(VALIDATOR.public,))
    store.hangs = lambda path: path.startswith(f"{VALIDATOR.public.hex()}/revisions/")
    with trio.move_on_after(60.0):
        await poll_authority(testbed.node, 5.0)
    assert testbed.node.revisions.number == 1


@simulated
async def test_only_a_few_unchecked_manifests_are_in_memory():
    store = JunkStore()
    testbed = make_follower_on(store)
    await testbed.publish(60)
    await testbed.restart()
    with pytest.raises(ProtocolError):
        await testbed.follower.refresh()
    assert 0 < store.max_bytes <= 16 * (limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_BYTES)


@simulated
async def test_a_fork_in_another_trainers_space_accuses_its_signer():
    testbed = await follow_chain()
    await testbed.publish(2)
    await testbed.follow()
    digests = [manifest.digest for manifest in testbed.chain.signed_manifests]
    digests[-1] = samples.digest("another history")
    await testbed.put_head(testbed.head(manifests=tuple(digests)), SECOND, at=TRAINER)
    with pytest.raises(ForkError):
        await testbed.follower.refresh()
    (line,) = testbed.node.alarms.drain()
    assert SECOND.public.hex()[:16] in line
    assert TRAINER.public.hex()[:16] not in line


@simulated
async def test_a_patch_that_hangs_hides_no_newer_head():
    store = HangingStore(seconds=600.0)
    testbed = await follow_chain_on(store)
    await testbed.publish()
    store.hangs = lambda path: path == testbed.patch_path(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_fresh, testbed.node, testbed.follower, 1.0)
        await trio.sleep(5.0)
        await testbed.publish(2)
        await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    assert testbed.follower.chain.head is not None
    assert testbed.follower.chain.head.version == 6


@simulated
async def test_a_fetch_of_the_head_that_hangs_is_given_up_for_the_next_one():
    store = HangingStore(seconds=600.0)
    testbed = await follow_chain_on(store)
    fetches = count()
    store.hangs = lambda path: path == paths.head(TRAINER.public) and next(fetches) == 0
    await testbed.publish()
    with trio.move_on_after(10.0):
        await keep_fresh(testbed.node, testbed.follower, 1.0)
    assert testbed.follower.chain.head is not None
    assert testbed.follower.chain.head.version == 4
    assert ["no answer within 5 s" in event["error"] for event in testbed.log.named("cannot-follow")] == [True]
