"""A trainer whose own versions the roots take back: it stops, and after a repair it goes on from the last valid one."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest
import trio

from grailnode.node.state_care import repair_state
from grailnode.store.memory import MemoryStore
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import StateStore
from protocol import paths
from protocol.errors import ChainError, RollbackError
from protocol.identity.authority import ChainPoint
from roles.authority_updates import refresh_authority
from roles.policy.follower import Follower
from roles.ports import RepairError, StateError
from roles.trainer.learn.checkpoint_files import repair_checkpoint
from roles.trainer.outer.round_files import ROUNDS
from roles.trainer.outer.round_repair import repair_rounds
from roles.trainer.publish.chain_repair import ChainRepair
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher
from roles.trainer.publish.rewind_repair import repair_rewind
from roles.trainer.spool import CHAIN, INBOX
from tests.roles.publisher_testbed import SETTINGS, PublisherTestbed, publish_until_killed, published
from tests.support.builders.chains import TRAINER, change_elements
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling, changes
from tests.support.measuring import store_listing
from tests.support.measuring.store_listing import copy_objects
from tests.support.simulation.virtual_clock import simulated


async def take_back(testbed: PublisherTestbed, version: int, digest: bytes | None = None) -> None:
    """Publish a revision that rewinds the chain to a version."""
    await testbed.revise(ChainPoint(version=version, digest=digest or (await testbed.head()).digest(version)))


async def taken_back() -> PublisherTestbed:
    """Return a testbed that has published versions 0 to 6, of which those after 4 are taken back."""
    testbed = await published(7)
    await take_back(testbed, 4)
    return testbed


async def assert_taken_back(follower: Follower) -> None:
    """Assert that a follower refuses a head with versions that are taken back."""
    with pytest.raises(RollbackError, match="a later revision of the authority takes back"):
        await follower.refresh()


async def repair(testbed: PublisherTestbed) -> list[str]:
    """Repair the trainer's state, and return the lines."""
    lines: list[str] = []
    node = testbed.node()
    await refresh_authority(node)
    assert await repair_rewind(node, lines.append)
    await repair_checkpoint(node.state, lines.append, chain_is_rebuilt=False, is_rewound=True)
    return lines


@simulated
async def test_a_trainer_does_not_go_on_with_versions_that_the_roots_take_back():
    testbed = await taken_back()
    await testbed.snapshot(7)
    for _ in range(2):  # its supervisor starts it again
        with pytest.raises(StateError, match=r"takes back the versions after 4.*up to 6; run `grailnode repair`"):
            await testbed.publish()
    assert (await testbed.head()).version == 6


@simulated
async def test_what_a_killed_trainer_had_shown_is_taken_back_as_well():
    """Its state does not call the version published yet, and would publish the same weights again."""
    testbed = await published(2)
    await testbed.snapshot(2)
    await publish_until_killed(testbed, "put", "chain/weights/0000000002")
    assert (await testbed.head()).version == 2
    await take_back(testbed, 1)
    with pytest.raises(StateError, match=r"takes back the versions after 1.*up to 2; run `grailnode repair`"):
        await testbed.publish()
    assert "versions 2 to 2 are taken back" in (await repair(testbed))[0]
    testbed.weights[2] = change_elements(testbed.weights[1], 500)
    await testbed.publish(2)
    await testbed.assert_followed(2)


@simulated
async def test_followers_do_not_take_up_again_what_was_taken_back():
    testbed, state = await published(7), MemoryStore()
    await testbed.assert_followed(6, state)
    await take_back(testbed, 4)
    for follower_state in (state, MemoryStore()):
        _, follower = await testbed.follower(follower_state)
        await assert_taken_back(follower)


@simulated
async def test_after_a_repair_the_trainer_goes_on_from_the_last_valid_version():
    testbed, state = await published(7), MemoryStore()
    await testbed.assert_followed(6, state)
    await take_back(testbed, 4)
    await testbed.state.put(f"{INBOX}0000000003-{bytes(32).hex()}", b"groups of version 6")
    lines = await repair(testbed)
    assert f"{CHAIN}: versions 5 to 6 are taken back by revision 1; 4 is the newest" in lines
    assert not await store_listing.paths(testbed.state, INBOX)
    await testbed.assert_followed(4, state)
    testbed.weights[5] = change_elements(testbed.weights[4], 500)
    await testbed.publish(5)
    for follower_state in (state, MemoryStore()):
        await testbed.assert_followed(5, follower_state)


@simulated
async def test_a_rewind_to_the_newest_version_stops_nobody():
    testbed = await published(7)
    await take_back(testbed, 6)
    await testbed.publish(7)
    assert (await testbed.head()).version == 7
    await testbed.publish(8)  # the rewind was obeyed once
    assert (await testbed.head()).version == 8


@simulated
async def test_a_rewind_to_somebody_elses_version_cannot_be_repaired():
    testbed = await published(7)
    await take_back(testbed, 4, digest=bytes(32))
    with pytest.raises(RepairError, match="has not published"):
        await repair(testbed)


class RevisingStore(MemoryStore):
    """A store that has the node learn of a revision while it reads its own head."""

    learn: Callable[[], Awaitable[None]] | None = None

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        if self.learn is not None and path == paths.head(TRAINER.public):
            learn, self.learn = self.learn, None
            await learn()
        return data


@simulated
async def test_a_head_that_is_being_made_when_the_rewind_arrives_is_refused():
    testbed = await published(7)
    testbed.store = store = await copy_objects(testbed.store, RevisingStore())
    node = testbed.node()
    publisher = Publisher(node, await History.open(node.state), SETTINGS)

    async def learn() -> None:
        await take_back(testbed, 4)
        await refresh_authority(node)

    async def publish_next() -> None:
        await publisher.started.wait()
        store.learn = learn
        await testbed.snapshot(7)

    with trio.move_on_after(30.0), pytest.raises(ExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.run)
            nursery.start_soon(publish_next)
    assert raised.group_contains(StateError)
    _, follower = await testbed.follower()
    await assert_taken_back(follower)


@simulated
async def test_a_coordinator_of_sites_does_not_publish_again_what_is_taken_back():
    """The state that its sites share is that of the versions that are taken back. The chain ends where it is valid."""
    testbed = await published(7)
    await testbed.state.put(f"{ROUNDS}0000000006-{TRAINER.public.hex()}", b"a signed round manifest")
    await take_back(testbed, 4)
    await repair(testbed)
    with pytest.raises(RepairError, match=r"sites share a state of later ones.*`grailnode export DIR`"):
        await repair_rounds(testbed.node(), set(), print, is_rewound=True)
    await testbed.assert_followed(4)


@simulated
async def test_a_state_that_is_older_than_the_last_valid_version_does_not_make_another_one():
    """A head that is taken back says nothing about the versions up to the rewind, which this state does not know."""
    testbed, state = await published(4), MemoryStore()
    backup = await copy_objects(testbed.state, MemoryStore())
    await testbed.publish(4, 5, 6, seconds=20.0)
    await testbed.assert_followed(6, state)
    await take_back(testbed, 4)
    valid, testbed.weights[4] = testbed.weights[4], change_elements(testbed.weights[3], 500)
    await testbed.snapshot(4, state=backup)
    with pytest.raises(ChainError, match="run `grailnode repair`"):
        await testbed.publish(state=backup)
    assert (await testbed.head()).version == 6
    node = testbed.node(state=backup)
    await refresh_authority(node)
    assert await repair_rewind(node, print)
    chain = ChainRepair(node, set(), print)
    assert await chain.is_needed()
    await chain.run()
    testbed.weights[4] = valid
    await testbed.assert_followed(4, state)
    testbed.weights[5] = change_elements(valid, 500)
    await testbed.publish(5, state=backup)
    await testbed.assert_followed(5, state)


class RepairedState(CrashingStore):
    """A state that a repair opens."""

    async def scan(self) -> dict[str, None]:
        return dict.fromkeys(await store_listing.paths(self))

    async def forget(self, path: str) -> None:
        await self.delete(path)


async def repair_until_killed(testbed: PublisherTestbed, count: int) -> bool:
    """Repair the trainer's state as `grailnode repair` does; kill it after some changes. Return whether it was."""
    with trio.CancelScope() as scope:
        trigger = CrashTrigger(changes, count, after=False, crash=cancelling(scope))
        state = StateDraft(cast(StateStore, RepairedState(testbed.state, trigger)))
        await repair_state(replace(testbed.node(), state=state, shared_revisions=None), lambda line: None)
    return trigger.has_fired


@simulated
async def test_a_repair_that_is_killed_at_any_change_leaves_nothing_of_what_is_taken_back():
    """The trainer goes on with the last valid version, or it refuses to start and another repair brings it there."""
    count, was_killed = 0, True
    while was_killed:
        testbed = await published(7)
        old_work = f"{INBOX}0000000003-{bytes(32).hex()}"
        await testbed.state.put(old_work, b"groups of version 6")
        await take_back(testbed, 4)
        was_killed = await repair_until_killed(testbed, count)
        try:
            await testbed.publish()
        except StateError:
            assert not await repair_until_killed(testbed, 1 << 60)
            await testbed.publish()
        assert old_work not in await store_listing.paths(testbed.state, INBOX)
        await testbed.assert_followed(4, after=count)
        count += 1
    assert count > 10
