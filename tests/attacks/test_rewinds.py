"""Rewinds after a theft: a node that followed the thief goes back to the honest chain when it learns of it."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import Weights
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from roles.authority_updates import refresh_authority
from roles.policy.serving import keep_fresh, serve
from tests.support.attacked_nodes.follower import ROOTS, SECOND, SUCCESSOR, AttackedFollower, follow_chain
from tests.support.builders.chains import TRAINER, change_elements, equal
from tests.support.faults.decorated_store import HangingStore
from tests.support.simulation.virtual_clock import running


async def honest_from(testbed: AttackedFollower, version: int, newest: int) -> None:
    """Replace what the thief published after a version by honest versions up to `newest`."""
    del testbed.chain.signed_manifests[version + 1 :], testbed.chain.weights[version + 1 :]
    while len(testbed.chain.signed_manifests) <= newest:
        await testbed.chain.publish(
            change_elements(testbed.chain.weights[-1], 1000 + len(testbed.chain.weights)), head=False
        )


class PlainEngine:
    """An engine without a model that only stores the weights that it serves."""

    version: int | None = None
    weights: Weights
    takes_patches = False

    async def stage(self, version: int, weights: Weights) -> None:
        self._staged = version, weights

    async def commit(self) -> None:
        self.version, self.weights = self._staged


async def hang(store: HangingStore, *hanging_paths: str) -> None:
    """Make every fetch of these objects hang."""
    for path in hanging_paths:
        await store.delete(path)
    store.hangs = hanging_paths.__contains__


class InterruptingStore(MemoryStore):
    """Storage that runs an action before it first answers for some paths."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Callable[[], Awaitable[object]]] = {}

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if (action := self.actions.pop(path, None)) is not None:
            await action()
        return await super().get(path, max_bytes, offset=offset, size=size)


async def test_a_node_that_learns_of_two_rewinds_at_once():
    testbed = await follow_chain()
    await testbed.publish()  # the first thief's
    await testbed.follow()
    await honest_from(testbed, 3, 5)
    first = testbed.next_revision(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,), rewind=testbed.point(3))
    await testbed.store.put(paths.revision(testbed.run_id, 1), sign(first, *ROOTS[:2]))
    late_node, testbed.node = testbed.node, testbed.new_node(state=MemoryStore())
    await refresh_authority(testbed.node)  # the author of the second revision knows the first
    revoked = tuple(sorted((TRAINER.public, SUCCESSOR.public)))
    await testbed.revise(trainers=(SECOND.public,), revoked=revoked, rewind=testbed.point(5))
    testbed.node = late_node
    await testbed.mirror(SECOND, epoch=1, revision=2)
    await refresh_authority(testbed.node)
    assert testbed.node.revisions.number == 2
    await testbed.assert_follows()


async def test_a_rewind_to_a_version_newer_than_the_followed_fork():
    testbed = await follow_chain()
    await testbed.publish()  # the thief's, shown to this node alone
    await testbed.follow()
    await honest_from(testbed, 3, 6)
    await testbed.rewind(6, SUCCESSOR)
    await refresh_authority(testbed.node)
    await testbed.assert_follows()


async def test_the_engine_replaces_the_thiefs_weights_by_the_honest_ones_of_that_version():
    testbed = await follow_chain()
    await testbed.publish()  # the thief's
    engine: Any = PlainEngine()
    await testbed.follow()
    await serve(testbed.node, engine, await testbed.follower.rebuild(4))
    await honest_from(testbed, 3, 4)
    await testbed.rewind(3, SUCCESSOR)
    await refresh_authority(testbed.node)
    await testbed.assert_follows()
    await serve(testbed.node, engine, await testbed.follower.rebuild(4))
    assert engine.version == 4
    assert equal(engine.weights, testbed.chain.weights[4])


async def test_a_rewind_that_arrives_while_a_head_is_being_fetched():
    store = InterruptingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish()  # the thief's
    await testbed.follow()
    await honest_from(testbed, 3, 4)
    await testbed.rewind(3, SECOND)
    await store.delete(paths.head(TRAINER.public))
    store.actions[paths.head(SECOND.public)] = lambda: refresh_authority(testbed.node)
    await testbed.follower.refresh()
    assert testbed.node.revisions.number == 1
    assert (await testbed.follower.rebuild(4)).digest == testbed.chain.signed_manifests[4].record.weights


async def successor_takes_over(testbed: AttackedFollower) -> None:
    """Rewind the chain to version 3 under another trainer, and let the node learn of it."""
    await honest_from(testbed, 3, 3)
    await testbed.rewind(3, SUCCESSOR)
    await refresh_authority(testbed.node)


async def sleep_uncancellably() -> None:
    """Take some seconds like a read in a thread, which cannot be cancelled."""
    with trio.CancelScope(shield=True):
        await trio.sleep(8)


async def test_a_rewind_during_an_uncancellable_read_of_the_thiefs_patch():
    store = InterruptingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish()  # the thief's
    await testbed.follower.refresh()
    store.actions[testbed.patch_path(4)] = sleep_uncancellably
    errors: list[ProtocolError] = []

    async def rebuild() -> None:
        try:
            await testbed.follower.rebuild(4)
        except ProtocolError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(rebuild)
        await trio.sleep(1)
        await successor_takes_over(testbed)
        await testbed.follower.refresh()
    assert ["rewound" in str(error) for error in errors] == [True]
    await testbed.assert_follows()


async def test_a_revoked_trainers_hanging_patches_do_not_keep_a_follower_busy():
    store = HangingStore()
    testbed = await follow_chain(store=store)
    await testbed.publish(3)  # the thief's
    await hang(store, testbed.patch_path(5), testbed.patch_path(6))
    async with running(keep_fresh, testbed.node, testbed.follower, 1.0):
        await trio.sleep(5)
        assert testbed.follower.version_for(6) == 6  # by the thief's chain
        await successor_takes_over(testbed)
        await trio.sleep(60)
        assert testbed.follower.version_for(6) == 3


# Two trainers with valid heads, of which one has stopped or lies: the newest chain that can be fetched is followed


@pytest.mark.parametrize(("is_newest_there", "followed"), [(True, 3), (False, 1)])
async def test_the_newest_head_goes_first_although_an_older_one_is_valid(is_newest_there: bool, followed: int) -> None:
    """Of two trainers the first has stopped at version 1. It is followed while the other's cannot be fetched."""
    testbed = AttackedFollower(trainers=(TRAINER.public, SECOND.public))
    await testbed.publish(4)
    await testbed.mirror(SECOND, epoch=1)
    await testbed.put_head(testbed.head(newest=1))
    await testbed.restart()
    if not is_newest_there:
        await testbed.store.delete(paths.manifest(SECOND.public, 3, testbed.chain.signed_manifests[3].digest))
    await testbed.follow()
    assert testbed.head_version == followed
