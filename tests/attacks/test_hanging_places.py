"""Spaces that hang, or answer with as many bytes as they may: no node waits for them or runs out of memory.

And a space with a record that another participant signed: the alarm names the signer, not the owner of the space.
"""

from collections.abc import Callable
from itertools import count

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.errors import ForkError, ProtocolError
from roles.authority_updates import poll_authority
from roles.policy.serving import keep_fresh
from roles.ports import StoreError
from tests.support.attacks.target import HOUR_MS, SECOND, VALIDATOR, Target, attack, holding
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER, Chain
from tests.support.simulation.network import BEGIN


class Hanging(MemoryStore):
    """Storage that does not answer for some paths, and fails after `seconds`."""

    def __init__(self, seconds: float = 3600.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.hangs: Callable[[str], bool] = lambda path: False

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if self.hangs(path):
            await trio.sleep(self.seconds)
            raise StoreError(f"{path}: no answer")
        return await super().get(path, max_bytes, offset=offset, size=size)


def target_on(store: MemoryStore) -> Target:
    """Return a target whose chain is in this store."""
    target = Target()
    target.store = store
    target.chain = Chain(target.run_id, store, int(BEGIN * 1000) + HOUR_MS)
    target.node = target.new_node()
    return target


async def holding_on(store: MemoryStore, versions: int = 3) -> Target:
    """Return a target that follows a chain in this store and has its newest weights."""
    target = target_on(store)
    await target.publish(versions + 1)
    await target.restart()
    await target.follow()
    return target


class Junk(MemoryStore):
    """Storage that answers junk for every manifest, and counts the bytes that its readers would take."""

    max_bytes = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/manifests/" in path:
            self.max_bytes += max_bytes
            return bytes(16)
        return await super().get(path, max_bytes, offset=offset, size=size)


@attack
async def test_a_revoked_validator_does_not_delay_its_revocation_by_hanging():
    store = Hanging(seconds=200.0)
    target = await holding_on(store)
    await target.revise(validators=(SECOND.public,), revoked=(VALIDATOR.public,))
    store.hangs = lambda path: path.startswith(f"{VALIDATOR.public.hex()}/revisions/")
    with trio.move_on_after(60.0):
        await poll_authority(target.node, 5.0)
    assert target.node.revisions.number == 1


@attack
async def test_only_a_few_unchecked_manifests_are_in_memory():
    store = Junk()
    target = target_on(store)
    await target.publish(60)
    await target.restart()
    with pytest.raises(ProtocolError):
        await target.follower.refresh()
    assert 0 < store.max_bytes <= 16 * (limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_BYTES)


@attack
async def test_a_fork_in_another_trainers_space_accuses_its_signer():
    target = await holding()
    await target.publish(2)
    await target.follow()
    digests = [manifest.digest for manifest in target.chain.signed]
    digests[-1] = samples.digest("another history")
    await target.show(target.head(manifests=tuple(digests)), SECOND, at=TRAINER)
    with pytest.raises(ForkError):
        await target.follower.refresh()
    (line,) = target.node.alarms.drain()
    assert SECOND.public.hex()[:16] in line
    assert TRAINER.public.hex()[:16] not in line


@attack
async def test_a_patch_that_hangs_hides_no_newer_head():
    store = Hanging(seconds=600.0)
    target = await holding_on(store)
    await target.publish()
    store.hangs = lambda path: path == target.patch_path(4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_fresh, target.node, target.follower, 1.0)
        await trio.sleep(5.0)
        await target.publish(2)
        await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    assert target.follower.chain.head is not None
    assert target.follower.chain.head.version == 6


@attack
async def test_a_fetch_of_the_head_that_hangs_is_given_up_for_the_next_one():
    store = Hanging(seconds=600.0)
    target = await holding_on(store)
    fetches = count()
    store.hangs = lambda path: path == paths.head(TRAINER.public) and next(fetches) == 0
    await target.publish()
    with trio.move_on_after(10.0):
        await keep_fresh(target.node, target.follower, 1.0)
    assert target.follower.chain.head is not None
    assert target.follower.chain.head.version == 4
    assert ["no answer within 5 s" in event["error"] for event in target.log.named("cannot-follow")] == [True]
