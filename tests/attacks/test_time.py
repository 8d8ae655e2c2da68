"""Records that are too new, always the same, or old (fast-forward, freeze, rollback), and true ones in wrong places."""

import pytest
import trio

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import creation
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import Trust
from protocol.errors import ExpiredError, ProtocolError
from protocol.identity.authority import Revision
from protocol.identity.signing import open_announced, sign
from roles.authority_updates import poll_authority, refresh_authority
from roles.policy.follower import TRUST_PATH
from roles.policy.mirroring import Mirror
from roles.ports import NotFoundError, StoreError
from tests.support.attacked_nodes.follower import (
    ROOTS,
    SECOND,
    STRANGER,
    SUCCESSOR,
    VALIDATOR,
    AttackedFollower,
    follow_chain,
)
from tests.support.builders.chains import MINER, TRAINER, equal
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import running

LAST_EPOCH = (1 << 53) - 1


async def successor_continues(testbed: AttackedFollower) -> None:
    """Rewind the chain to version 3 under the successor, and let the node learn of it and follow."""
    await testbed.rewind(3, SUCCESSOR)
    await refresh_authority(testbed.node)
    await testbed.assert_follows()


# Fast-forward


async def test_fast_forward_by_a_stolen_key_ends_with_a_rewind_of_the_epoch():
    testbed = await follow_chain()
    await testbed.put_head(testbed.head(epoch=LAST_EPOCH))
    await testbed.follow()
    await successor_continues(testbed)
    trust = Trust.from_bytes(await testbed.state.get(TRUST_PATH, 1 << 20))
    assert (trust.epoch, trust.version, trust.revision) == (1, 3, 1)


async def test_fast_forward_by_a_stolen_key_ends_with_a_rewind_of_the_versions():
    testbed = await follow_chain()
    await testbed.publish(3)  # the thief's
    await testbed.follow()
    thiefs_weights = testbed.chain.weights[6]
    del testbed.chain.signed_manifests[4:], testbed.chain.weights[4:]
    await successor_continues(testbed)
    assert testbed.follower.newest is not None and testbed.follower.newest.version == 3
    assert not equal(testbed.follower.newest.weights, thiefs_weights)
    await testbed.restart()
    await testbed.assert_follows()


async def test_fast_forward_of_a_rewound_node_back_to_the_thiefs_chain():
    testbed = await follow_chain()
    old_head = testbed.head(epoch=5)
    await testbed.revise_and_learn(trainers=(SUCCESSOR.public, TRAINER.public), rewind=testbed.point(3))
    await testbed.mirror(SUCCESSOR, epoch=6, revision=1)
    await testbed.follow()
    await testbed.store.delete(paths.head(SUCCESSOR.public))
    await testbed.put_head(old_head)
    with pytest.raises(Exception, match="head"):
        await testbed.follower.refresh()
    assert testbed.follower.chain.trust is not None and testbed.follower.chain.trust.epoch == 6


# Indefinite freeze


@pytest.mark.parametrize("is_withheld", [False, True], ids=["the same head", "no head"])
async def test_freeze_for_ever_ends_when_the_head_expires(is_withheld: bool) -> None:
    testbed = await follow_chain()
    if is_withheld:
        await testbed.store.delete(paths.head(TRAINER.public))
        await testbed.assert_refuses("head")
    assert testbed.follower.version_for(3) == 3
    await trio.sleep(3601.0)
    await testbed.assert_refuses("head" if is_withheld else "has expired")
    with pytest.raises(ExpiredError):
        testbed.follower.version_for(3)
    await testbed.restart()
    await testbed.assert_refuses("head" if is_withheld else "has expired")


async def test_freeze_of_a_revocation_at_the_meeting_point():
    testbed = await follow_chain()
    copy = paths.revision_copy(VALIDATOR.public, 1)
    await testbed.revise_and_learn(at=copy, trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    assert testbed.node.authority.trainers == (SUCCESSOR.public,)
    copy_of_space = MemoryStore()
    with pytest.raises(NotFoundError, match="head"):  # the successor has published nothing yet
        await Mirror(testbed.node, copy_of_space).copy()
    assert await copy_of_space.get(paths.revision_copy(SUCCESSOR.public, 1), 1 << 20)


async def test_freeze_of_a_mirror_by_an_anchor_of_a_key_that_was_revoked() -> None:
    testbed = await follow_chain()
    await creation.publish_files(testbed.store, TRAINER.public, creation.model_files(PACKAGED_POLICY))
    target = UnreachableStore(MemoryStore(), paths.kind_prefix(TRAINER.public, "anchors"), operations=["put"])
    mirror, target.is_away = Mirror(testbed.node, target), False
    await mirror.copy()
    target.is_away = True
    await testbed.publish(anchor=True)
    with pytest.raises(StoreError):
        await mirror.copy()
    await testbed.revise_and_learn(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await testbed.mirror(SUCCESSOR, revision=1)
    await mirror.copy()


# Rollback


@pytest.mark.parametrize("path", [TRUST_PATH, "authority/0000000001"])
async def test_rollback_by_damaging_the_nodes_state(path: str) -> None:
    testbed = await follow_chain()
    await testbed.revise_and_learn(revoked=(STRANGER.public,))
    await testbed.state.put(path, sign(testbed.run, *ROOTS))
    with pytest.raises(ProtocolError):
        await testbed.restart()


async def test_rollback_of_a_revocation_by_withholding_it():
    testbed = await follow_chain()
    await testbed.revise_and_learn(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await testbed.store.delete(paths.revision(testbed.run_id, 1))
    await testbed.restart()  # it reads its own state
    assert testbed.node.authority.revoked == (TRAINER.public,)
    await testbed.assert_refuses("head")


# Malicious mirrors


@pytest.mark.parametrize("lie", ["false", "frozen", "empty"])
async def test_mirror_one_of_two_trainers_spaces(lie: str) -> None:
    testbed = await follow_chain()
    frozen_head = testbed.head(expires_ms=int(testbed.clock.now() * 1000))
    await testbed.publish()
    await testbed.mirror(SECOND)
    if lie == "false":
        await testbed.store.put(paths.head(TRAINER.public), b"\xc1")
    elif lie == "frozen":
        await testbed.put_head(frozen_head)
    else:
        async for item in testbed.store.list(TRAINER.public.hex()):
            await testbed.store.delete(item.path)
    await testbed.assert_follows()


async def test_mirror_strangers_spaces_are_not_read_for_revisions():
    testbed = await follow_chain()
    await testbed.revise_and_learn(at=paths.revision_copy(STRANGER.public, 1), revoked=(MINER.public,))
    assert testbed.node.revisions.number == 0


async def test_mirror_an_honest_validator_passes_a_revision_on_and_a_miner_does_not():
    testbed = await follow_chain()
    await testbed.revise(revoked=(STRANGER.public,))
    validator = testbed.new_node(key=VALIDATOR, state=type(testbed.state)(), log=Log("validator"))
    await refresh_authority(validator)
    await testbed.store.delete(paths.revision(testbed.run_id, 1))  # as a meeting point that hides it
    await refresh_authority(testbed.node)
    assert testbed.node.authority.revoked == (STRANGER.public,)
    assert not [item.path async for item in testbed.store.list(MINER.public.hex())]


# Mix-and-match


async def test_mix_two_heads_for_one_version_is_an_alarm():
    testbed = await follow_chain()
    fork = open_announced(
        sign(testbed.chain.signed_manifests[3].record.model_copy(update={"optimizer_step": 99}), TRAINER), Manifest
    )
    digests = tuple(manifest.digest for manifest in (*testbed.chain.signed_manifests[:3], fork))
    await testbed.put_head(testbed.head(manifests=digests))
    await testbed.assert_refuses("another manifest for trusted version 3")
    (line,) = testbed.node.alarms.drain()
    assert f"trainer {TRAINER.public.hex()[:16]} signed two histories" in line
    assert testbed.node.alarms.drain() == ()  # one alarm only
    assert testbed.log.named("alarm")


async def test_mix_a_second_revision_with_a_known_number():
    testbed = await follow_chain()
    await testbed.revise(note="one")
    fork: Revision = testbed.next_revision(note="the other")
    await refresh_authority(testbed.node)
    await testbed.store.put(paths.revision_copy(VALIDATOR.public, 1), sign(fork, *ROOTS[1:]))
    await testbed.assert_refuses_revision("the roots signed two histories", event="alarm")
    assert testbed.node.revisions.number == 1
    assert len(testbed.node.alarms.drain()) == 1


async def test_mix_two_new_revisions_with_one_number():
    testbed = await follow_chain()
    await testbed.revise(trainers=(SUCCESSOR.public,))
    await testbed.revise(at=paths.revision_copy(VALIDATOR.public, 1), trainers=(STRANGER.public,))
    await testbed.assert_refuses_revision("none is obeyed", event="alarm")
    async with running(poll_authority, testbed.node):  # which asks the two places at different times
        await trio.sleep(60.0)
    assert testbed.node.revisions.number == 0
    await testbed.publish()
    await testbed.assert_follows()
