"""Places that hang, or answer with as much as they may: nobody waits for them, and nobody runs out of memory.

And a place that holds what somebody else signed: the signer is accused, not whose place it is.
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
    """Storage that says nothing of some paths, until its readers give up by themselves after `seconds`."""

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
    """A target whose chain lies in this store."""
    target = Target()
    target.store = store
    target.chain = Chain(target.run_id, store, int(BEGIN * 1000) + HOUR_MS)
    target.node = target.new_node()
    return target


async def holding_on(store: MemoryStore, versions: int = 3) -> Target:
    """A target that holds the newest of some versions in this store."""
    target = target_on(store)
    await target.publish(versions + 1)
    await target.restart()
    await target.follow()
    return target


class Junk(MemoryStore):
    """Storage that shows something else for every manifest, as large as its readers take, and counts how much that is."""

    asked = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if "/manifests/" in path:
            self.asked += max_bytes
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
async def test_no_more_than_a_few_hostile_manifests_are_held():
    store = Junk()
    target = target_on(store)
    await target.publish(60)
    await target.restart()
    with pytest.raises(ProtocolError):
        await target.follower.refresh()
    assert 0 < store.asked <= 16 * (limits.MAX_RECORD_BYTES + limits.MAX_ENVELOPE_BYTES)


@attack
async def test_a_fork_in_a_place_of_another_trainers_accuses_who_signed_it():
    target = await holding()
    await target.publish(2)
    await target.follow()
    names = [signed.digest for signed in target.chain.signed]
    names[-1] = samples.digest("another history")
    await target.show(target.head(manifests=tuple(names)), SECOND, at=TRAINER)
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
async def test_a_look_at_the_head_that_hangs_is_given_up_for_the_next_one():
    store = Hanging(seconds=600.0)
    target = await holding_on(store)
    looks = count()
    store.hangs = lambda path: path == paths.head(TRAINER.public) and next(looks) == 0
    await target.publish()
    with trio.move_on_after(10.0):
        await keep_fresh(target.node, target.follower, 1.0)
    assert target.follower.chain.head is not None
    assert target.follower.chain.head.version == 4
    assert ["no answer within 5 s" in event["error"] for event in target.log.named("cannot-follow")] == [True]
