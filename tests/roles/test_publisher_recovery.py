"""The publisher after a stolen key, kills, and storage that shows a wrong or an old head: it goes on and cleans up."""

import itertools
from dataclasses import replace

import pytest

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.chain.manifest import Manifest
from protocol.errors import ChainError
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import open_announced, sign
from roles.trainer.publish.head_writer import make_head
from roles.trainer.publish.history import History
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
from tests.support.builders.chains import TRAINER
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.measuring.store_listing import copy_objects, names_below
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.virtual_clock import simulated

LAST_EPOCH = (1 << 53) - 1


# A stolen key


@simulated
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


@simulated
async def test_a_head_that_is_too_large_is_written_over():
    testbed = await published(1)
    await testbed.store.put(paths.head(TRAINER.public), bytes(2 << 20))
    await testbed.publish(1)
    assert (await testbed.head()).version == 1


@simulated
async def test_an_old_head_does_not_stop_its_trainer():
    testbed = await published(1)
    old = await testbed.store.get(paths.head(TRAINER.public), 1 << 20)
    await testbed.publish(*range(1, 11), seconds=60)
    await testbed.store.put(paths.head(TRAINER.public), old)  # storage was rolled back
    await testbed.publish(11)
    await testbed.assert_followed(11)


# Kills


@pytest.mark.parametrize("newest_version", [0, 2])
@simulated
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


@simulated
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


@simulated
async def test_killed_while_old_versions_are_deleted_and_then_configured_to_keep_more():
    testbed = PublisherTestbed()
    few = replace(SETTINGS, anchor_interval=1, keep_patches=1, keep_anchors=1)
    await testbed.publish(0, settings=few)
    await testbed.snapshot(1, 2, 3, 4)
    await publish_until_killed(testbed, "delete", "chain/anchors/", settings=few, seconds=60)
    await testbed.publish(5, settings=replace(few, keep_anchors=10), seconds=60)
    await testbed.assert_followed(5)
    assert await names_below(testbed.state, "chain/anchors/") == await names_below(testbed.state, "chain/manifests/")


@pytest.mark.parametrize("after", few_daily([False, True], 2))
@simulated
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


@simulated
async def test_opening_the_history_of_a_running_trainer_deletes_nothing():
    testbed = await published(2)
    await testbed.snapshot(0)  # its note is left over, and its files would be cleaned up
    objects = await names_below(testbed.state, "")
    await History.open(testbed.state)  # as another process does, to look something up
    assert await names_below(testbed.state, "") == objects


@simulated
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
