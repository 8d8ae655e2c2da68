"""The publisher after a stolen key, kills, wrong heads and rewinds by the roots: it goes on from the last valid
version, or stops and is repaired, and cleans up.
"""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest
import trio

from grailnode.node.state_care import repair_state
from grailnode.store.memory import MemoryStore
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import StateStore
from protocol import limits, paths
from protocol.chain.manifest import Manifest
from protocol.errors import ChainError, RollbackError
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import open_announced, sign
from protocol.pseudogradient import Keep
from roles.authority_updates import refresh_authority
from roles.policy.follower import Follower
from roles.ports import RepairError, StateError
from roles.trainer.learn.checkpoint_files import repair_checkpoint
from roles.trainer.outer.round_files import ROUNDS
from roles.trainer.outer.round_repair import repair_rounds
from roles.trainer.publish.chain_repair import ChainRepair, repair_rewind
from roles.trainer.publish.head_writer import make_head
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher
from roles.trainer.spool import CHAIN, INBOX
from tests.roles.publisher_testbed import (
    SETTINGS,
    SUCCESSOR,
    LosesPatches,
    PublisherTestbed,
    killed_at,
    publish_until_killed,
    published,
)
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER, change_elements
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling, changes
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.measuring import store_listing
from tests.support.measuring.store_listing import copy_objects, names_below
from tests.support.pytest_options.few_daily import few_daily

LAST_EPOCH = (1 << 53) - 1


# A stolen key


async def test_a_thiefs_last_epoch_does_not_spoil_the_owners_state():
    testbed = await published(4)
    head = await testbed.head()
    await testbed.store.put(paths.head(TRAINER.public), sign(head.model_copy(update={"epoch": LAST_EPOCH}), TRAINER))
    for _ in range(2):  # its supervisor starts it again
        with pytest.raises(ChainError, match="an epoch that nobody can follow"):
            await testbed.publish()
    point = ChainPoint(version=3, digest=head.digest(3))
    await testbed.revise(point, trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await testbed.publish(4, key=SUCCESSOR)
    await testbed.assert_followed(4)


# Storage


async def test_a_head_that_is_too_large_is_written_over():
    testbed = await published(1)
    await testbed.store.put(paths.head(TRAINER.public), bytes(2 << 20))
    await testbed.publish(1)
    assert (await testbed.head()).version == 1


async def test_an_old_head_does_not_stop_its_trainer():
    testbed = await published(1)
    old = await testbed.store.get(paths.head(TRAINER.public), 1 << 20)
    await testbed.publish(*range(1, 11), seconds=60)
    await testbed.store.put(paths.head(TRAINER.public), old)  # storage was rolled back
    await testbed.publish(11)
    await testbed.assert_followed(11)


# Kills


@pytest.mark.parametrize("newest_version", [0, 2])
async def test_killed_between_a_head_and_its_mark_it_never_shows_an_older_head(newest_version: int):
    """It may then fail to go on, and what followers have seen is what a repair continues."""
    testbed = PublisherTestbed()
    if newest_version:
        await testbed.publish(*range(newest_version))
    await testbed.snapshot(newest_version)
    await publish_until_killed(testbed, "put", f"chain/weights/{newest_version:010d}")
    shown = await testbed.head()
    assert shown.version == newest_version
    await testbed.publish(seconds=SETTINGS.takeover_seconds / 2)
    assert (await testbed.head()).manifests == shown.manifests
    await testbed.publish()
    assert (await testbed.head()).manifests == shown.manifests
    assert await names_below(testbed.state, "outbox/") == []
    await testbed.assert_followed(newest_version)


async def test_killed_after_the_anchor_of_a_version_without_a_patch_and_then_rotated():
    testbed, store = PublisherTestbed(), LosesPatches()
    testbed.store, store.losing = store, False
    settings = replace(SETTINGS, anchor_interval=100, keep_patches=100)
    await testbed.publish(0, 1, settings=settings)
    store.losing = True
    await testbed.snapshot(2)
    await publish_until_killed(testbed, "put", "chain/weights/0000000002", settings=settings, seconds=60)
    store.losing = False
    await testbed.revise(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await testbed.publish(3, key=SUCCESSOR, settings=settings, seconds=60)
    assert (await testbed.head(SUCCESSOR)).version == 3
    await testbed.assert_followed(3)


@pytest.mark.parametrize("after", few_daily([False, True], 2))
async def test_killed_at_any_operation_it_leaves_nothing_over_and_the_chain_verifies(after: bool):
    settings = replace(SETTINGS, keep_patches=2, keep_anchors=1, takeover_seconds=0.1, poll_seconds=0.5)
    template = PublisherTestbed()
    await template.publish(0, 1, seconds=2, settings=settings)
    await template.snapshot(2, 3, 4)
    for operation in itertools.count():
        testbed = PublisherTestbed()
        testbed.store = await copy_objects(template.store, MemoryStore())
        testbed.state = await copy_objects(template.state, MemoryStore())
        if not await killed_at(testbed, operation, 3, after=after, settings=settings):
            break
        await testbed.publish(seconds=3, settings=settings)
        await testbed.assert_followed(4, after=operation)
        await testbed.publish(5, 6, seconds=3, settings=settings)
        assert (operation, await names_below(testbed.state, "chain/weights/")) == (operation, ["0000000006"])
        assert (operation, await names_below(testbed.state, "weights/")) == (operation, ["0000000006/00000"])
        notes = set(await names_below(testbed.state, "chain/anchors/")) - set(
            await names_below(testbed.state, "chain/manifests/")
        )
        assert (operation, notes) == (operation, set())
    assert operation > 20


# The state


async def test_opening_the_history_of_a_running_trainer_deletes_nothing():
    testbed = await published(2)
    await testbed.snapshot(0)  # its note is left over, and its files would be cleaned up
    objects = await names_below(testbed.state, "")
    await History.open(testbed.state)  # as another process does, to look something up
    assert await names_below(testbed.state, "") == objects


async def test_weights_stay_until_their_anchor_is_uploaded_and_no_longer():
    testbed = await published(1)
    anchors = paths.kind_prefix(TRAINER.public, "anchors")
    store = UnreachableStore(testbed.store, anchors, operations=("put",), seconds=0.0)
    testbed.store = store
    await testbed.publish(1, 2, 3, 4, 5)
    assert [name.split("/")[0] for name in await names_below(testbed.state, "weights/")] == [
        f"{version:010d}" for version in (2, 4, 5)
    ]
    store.is_away = False
    await testbed.publish()
    assert [name.split("/")[0] for name in await names_below(testbed.state, "weights/")] == ["0000000005"]
    assert (await testbed.head()).anchors[-1] == 4
    await testbed.assert_followed(5)


def long_history(versions: int, *anchors: int) -> History:
    """Return a history of so many versions, all with the same manifest."""
    history = History(MemoryStore())
    signed = open_announced(sign(samples.manifest(), TRAINER), Manifest)
    history.manifests = dict.fromkeys(range(versions), signed)
    history.anchors = set(anchors)
    return history


@pytest.mark.parametrize(("patches", "anchors"), [(100, 100), (5000, 10), (5000, 100), (1 << 20, 1 << 20)])
def test_a_head_lists_no_more_than_its_maximum_whatever_is_configured(patches: int, anchors: int):
    head = make_head(long_history(5001, *range(0, 5001, 50)), 5000, patches, anchors, samples.RUN_ID, 0, 1)
    assert head.version == 5000
    assert head.base == 950  # an anchor
    assert len(head.manifests) <= limits.MAX_CHAIN < len(head.manifests) + 50


def test_a_chain_without_a_recent_anchor_has_no_head():
    history = long_history(limits.MAX_CHAIN + 1, 0)
    stamp = samples.RUN_ID, 0, 1
    assert len(make_head(history, limits.MAX_CHAIN - 1, 100, 10, *stamp).manifests) == limits.MAX_CHAIN
    with pytest.raises(ChainError, match="no anchor of the last 4096 versions"):
        make_head(history, limits.MAX_CHAIN, 100, 10, *stamp)


# Versions that the roots take back: the trainer stops, and after a repair it goes on from the last valid one


async def take_back(testbed: PublisherTestbed, version: int, digest: bytes | None = None) -> None:
    """Publish a revision that rewinds the chain to a version."""
    await testbed.revise(ChainPoint(version=version, digest=digest or (await testbed.head()).digest(version)))


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


async def test_after_a_repair_the_trainer_goes_on_from_the_last_valid_version():
    """Until then it stops, and followers do not take up again what was taken back."""
    testbed, state = await published(7), MemoryStore()
    await testbed.assert_followed(6, state)
    await take_back(testbed, 4)
    for follower_state in (state, MemoryStore()):
        _, follower = await testbed.follower(follower_state)
        await assert_taken_back(follower)
    await testbed.snapshot(7)
    for _ in range(2):  # its supervisor starts it again
        with pytest.raises(StateError, match=r"takes back the versions after 4.*up to 6; run `grailnode repair`"):
            await testbed.publish()
    assert (await testbed.head()).version == 6
    await testbed.state.put(f"{INBOX}0000000003-{bytes(32).hex()}", b"groups of version 6")
    lines = await repair(testbed)
    assert f"{CHAIN}: versions 5 to 6 are taken back by revision 1; 4 is the newest" in lines
    assert not await store_listing.paths(testbed.state, INBOX)
    await testbed.assert_followed(4, state)
    testbed.weights[5] = change_elements(testbed.weights[4], 500)
    await testbed.publish(5)
    for follower_state in (state, MemoryStore()):
        await testbed.assert_followed(5, follower_state)


async def test_a_rewind_to_the_newest_version_stops_nobody():
    testbed = await published(7)
    await take_back(testbed, 6)
    await testbed.publish(7)
    assert (await testbed.head()).version == 7
    await testbed.publish(8)  # the rewind was obeyed once
    assert (await testbed.head()).version == 8


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


async def test_a_coordinator_of_sites_does_not_publish_again_what_is_taken_back():
    """The state that its sites share is that of the versions that are taken back. The chain ends where it is valid."""
    testbed = await published(7)
    await testbed.state.put(f"{ROUNDS}0000000006-{TRAINER.public.hex()}", b"a signed round manifest")
    await take_back(testbed, 4)
    await repair(testbed)
    with pytest.raises(RepairError, match=r"sites share a state of later ones.*`grailnode export DIR`"):
        await repair_rounds(testbed.node(), set(), print, is_rewound=True)
    await testbed.assert_followed(4)


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

    def scratch(self) -> Keep:
        return lambda data: data


async def repair_until_killed(testbed: PublisherTestbed, count: int) -> bool:
    """Repair the trainer's state as `grailnode repair` does; kill it after some changes. Return whether it was."""
    with trio.CancelScope() as scope:
        trigger = CrashTrigger(changes, count, after=False, crash=cancelling(scope))
        state = StateDraft(cast(StateStore, RepairedState(testbed.state, trigger)))
        await repair_state(replace(testbed.node(), state=state, shared_revisions=None), lambda line: None)
    return trigger.has_fired


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
