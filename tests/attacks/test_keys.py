"""Key compromise: what a thief can do with one key, and how soon a revocation ends it."""

import dataclasses
from typing import Any

import pytest
import trio

from protocol import limits, paths
from protocol.identity.admission import Invite, do_work
from protocol.identity.signing import SigningKey, sign
from roles.authority_updates import POLL_SECONDS, poll_authority, refresh_authority
from roles.node.identity import Node
from tests.support.attacked_nodes.follower import ROOTS, SECOND, STRANGER, VALIDATOR, AttackedFollower, follow_chain
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.simulation.virtual_clock import running


async def test_keys_a_revoked_trainer_is_refused_within_one_poll():
    testbed = await follow_chain()
    async with running(poll_authority, testbed.node):
        await trio.sleep(0.5)
        await testbed.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
        await trio.sleep(POLL_SECONDS)
        await testbed.publish()  # the thief goes on
        await testbed.mirror(SECOND, newest=3, epoch=1, revision=1)
        await testbed.follower.refresh()
    assert testbed.head_version == 3
    assert testbed.follower.version_for(3) == 3


async def test_keys_a_revoked_trainers_manifests_are_refused():
    testbed = await follow_chain(1)
    await testbed.restart_without_state()
    await testbed.mirror(SECOND, epoch=1, revision=1)
    thiefs_manifest = sign(testbed.chain.signed_manifests[0].record, TRAINER)
    await testbed.store.put(paths.manifest(SECOND.public, 0, testbed.chain.signed_manifests[0].digest), thiefs_manifest)
    await testbed.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await refresh_authority(testbed.node)
    await testbed.assert_refuses("not signed by keys that may sign it")


TWO_MUST_SIGN = "signed by [01] roots? where 2 must sign"
THEFT = {"trainers": (STRANGER.public,)}
FALSE_REVISIONS: dict[str, tuple[tuple[SigningKey, ...], dict[str, Any], str]] = {  # signers, changes, refusal
    "signed by one root": ((ROOTS[0],), THEFT, TWO_MUST_SIGN),
    "signed by all online keys": ((TRAINER, SECOND, VALIDATOR), THEFT, TWO_MUST_SIGN),
    "signed by a key too many": (
        (*ROOTS[:2], STRANGER),
        {"revoked": (MINER.public,)},
        "signed by a key that is no root",
    ),
    "a number too high": (ROOTS[:2], {"number": 4096}, "revision 4096 stands in its place"),
    "of another run": (ROOTS[:2], {"run": samples.digest("another run")}, "of another run"),
}


@pytest.mark.parametrize("is_copy", [False, True], ids=["at the meeting point", "at a validator"])
@pytest.mark.parametrize(("signers", "changes", "refusal"), FALSE_REVISIONS.values(), ids=FALSE_REVISIONS)
async def test_keys_a_false_revision_is_refused(
    signers: tuple[SigningKey, ...], changes: dict[str, Any], refusal: str, is_copy: bool
) -> None:
    testbed = await follow_chain()
    await testbed.revise(*signers, at=paths.revision_copy(VALIDATOR.public, 1) if is_copy else "", **changes)
    await testbed.assert_refuses_revision(refusal)
    await testbed.publish()
    await testbed.assert_follows()


async def test_keys_a_revision_larger_than_its_limit_is_refused():
    testbed = await follow_chain()
    await testbed.store.put(paths.revision(testbed.run_id, 1), bytes(4 * limits.MAX_RUN_BYTES))
    await testbed.assert_refuses_revision("revisions/.*: 2097152 bytes where at most")
    await testbed.assert_follows()


async def test_keys_roots_that_were_replaced_cannot_revise():
    testbed = await follow_chain()
    new_keys = tuple(SigningKey(bytes([number]) * 32) for number in (211, 212, 213))
    roots = tuple(key.public for key in new_keys)
    await testbed.revise(*ROOTS[:2], *new_keys[:2], roots=roots, revoked=tuple(sorted(key.public for key in ROOTS)))
    await refresh_authority(testbed.node)
    assert testbed.node.authority.roots == roots
    await testbed.revise(*ROOTS, trainers=(STRANGER.public,))
    await testbed.assert_refuses_revision("signed by 0 roots where 2 must sign")
    await testbed.revise(*new_keys[1:], trainers=(SECOND.public,))
    await refresh_authority(testbed.node)
    assert testbed.node.authority.trainers == (SECOND.public,)


async def test_keys_a_stranger_that_announces_itself_as_a_validator():
    testbed = AttackedFollower()
    await testbed.new_node(key=STRANGER).announce("validator", 60.0)
    await testbed.new_node(key=VALIDATOR).announce("validator", 60.0)
    assert await testbed.participants("validator") == [VALIDATOR.public]


async def test_keys_a_revoked_inviters_invitations_end():
    inviter = samples.key("inviter")
    testbed = AttackedFollower(admission=samples.admission(policy="invite", inviters=(inviter.public,)))

    async def token(node: Node) -> bytes:
        return sign(Invite(run=node.run_id, key=node.key.public, expires_ms=1 << 50), inviter)

    await dataclasses.replace(testbed.node, credential=token).announce("miner", 60.0)
    assert await testbed.participants() == [MINER.public]
    await testbed.revise_and_learn(admission=samples.admission(policy="invite"), revoked=(inviter.public,))
    assert await testbed.participants() == []
    assert "no invitation by an inviter of this run" in testbed.logged_error("announcement-refused")


async def test_keys_a_miner_without_proof_of_work_is_refused():
    async def short_work(node: Node) -> bytes:
        return do_work(node.run_id, STRANGER.public, 12, int(node.clock.now() * 1000) + 1000).to_bytes()

    testbed = AttackedFollower(admission=samples.admission(credential="work", difficulty=12))
    await dataclasses.replace(testbed.node, credential=short_work).announce("miner", 60.0)
    assert await testbed.participants() == []
    assert "zero bits" in testbed.logged_error("announcement-refused")


async def test_keys_refused_junk_is_not_fetched_again_at_once():
    testbed = AttackedFollower()
    junk = [samples.key(str(number)).public for number in range(20)]
    for key in junk:
        await testbed.store.put(paths.participant(key), b"junk")
    for _ in range(5):
        await testbed.participants()
    assert len(testbed.log.named("announcement-refused")) == len(junk)
    await trio.sleep(11.0)
    await testbed.participants()
    assert len(testbed.log.named("announcement-refused")) == 2 * len(junk)
