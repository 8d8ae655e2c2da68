"""Key compromise: what a thief can do with one key, and how soon a revocation ends it."""

import dataclasses
from typing import Any

import pytest
import trio

from protocol import paths
from protocol.chain.verifier import Trust
from protocol.errors import ProtocolError
from protocol.identity.admission import Invite, do_work
from protocol.identity.signing import SigningKey, sign
from roles.authority_updates import POLL_SECONDS, poll_authority, refresh_authority
from roles.node.identity import Node
from roles.participants import find_participants
from roles.policy.follower import TRUST_PATH
from tests.support.attacks.target import ROOTS, SECOND, STRANGER, SUCCESSOR, VALIDATOR, Target, attack, holding
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER


@attack
async def test_keys_a_revoked_trainer_is_refused_within_one_poll():
    target = await holding()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll_authority, target.node)
        await trio.sleep(0.5)
        await target.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
        await trio.sleep(POLL_SECONDS)
        await target.publish()  # the thief goes on
        await target.mirror(SECOND, newest=3, epoch=1, revision=1)
        await target.follower.refresh()
        nursery.cancel_scope.cancel()
    assert target.follower.chain.head is not None and target.follower.chain.head.version == 3
    assert target.follower.version_for(3) == 3


@attack
async def test_keys_a_revoked_trainers_manifests_are_refused():
    target = await holding(1)
    await target.cold()
    await target.mirror(SECOND, epoch=1, revision=1)
    stolen = sign(target.chain.signed[0].record, TRAINER)
    await target.store.put(paths.manifest(SECOND.public, 0, target.chain.signed[0].digest), stolen)
    await target.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await refresh_authority(target.node)
    await target.refuses("not signed by keys that may sign it")


@attack
async def test_keys_weights_verified_before_a_revocation_stay_in_memory():
    target = await holding()
    await target.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await refresh_authority(target.node)
    await target.refuses("head")
    assert target.follower.version_for(2) == 2
    assert (await target.follower.rebuild(3)).version == 3


@attack
async def test_keys_a_successor_continues_the_chain_of_a_stolen_key():
    target = await holding()
    await target.revise(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await target.publish()
    await target.mirror(SUCCESSOR, epoch=1, revision=1)
    await refresh_authority(target.node)
    await target.goes_on()
    trust = Trust.from_bytes(await target.state.get(TRUST_PATH, 1 << 20))
    assert (trust.epoch, trust.version) == (1, 4)


@pytest.mark.parametrize(
    "thieves",
    [(ROOTS[0],), (TRAINER,), (VALIDATOR,), (TRAINER, SECOND, VALIDATOR), (ROOTS[0], TRAINER), (ROOTS[2], STRANGER)],
    ids=["one root", "trainer", "validator", "all online keys", "root and trainer", "root and stranger"],
)
def test_keys_that_cannot_revise(thieves: tuple[SigningKey, ...]) -> None:
    @attack
    async def scenario() -> None:
        target = await holding()
        await target.revise(*thieves, trainers=(STRANGER.public,))
        await target.refuses_revision("signed by . roots? where 2 must sign|signed by [01] roots where 2 must sign")
        await target.publish()
        await target.goes_on()

    scenario()


@attack
async def test_keys_roots_that_were_replaced_cannot_revise():
    target = await holding()
    new_keys = tuple(SigningKey(bytes([number]) * 32) for number in (211, 212, 213))
    roots = tuple(key.public for key in new_keys)
    await target.revise(*ROOTS[:2], *new_keys[:2], roots=roots, revoked=tuple(sorted(key.public for key in ROOTS)))
    await refresh_authority(target.node)
    assert target.node.authority.roots == roots
    await target.revise(*ROOTS, trainers=(STRANGER.public,))
    await target.refuses_revision("signed by 0 roots where 2 must sign")
    await target.revise(*new_keys[1:], trainers=(SECOND.public,))
    await refresh_authority(target.node)
    assert target.node.authority.trainers == (SECOND.public,)


@attack
async def test_keys_new_roots_that_did_not_sign():
    target = await holding()
    await target.revise(roots=tuple(samples.key(name).public for name in "abc"))
    await target.refuses_revision("new roots: signed by 0 roots where 2 must sign")


@attack
async def test_keys_a_root_of_small_order():
    target = await holding()
    await target.revise(roots=(ROOTS[0].public, ROOTS[1].public, b"\1" + bytes(31)))
    await target.refuses_revision("small order")


@attack
async def test_keys_a_revision_with_one_foreign_signature_is_refused():
    target = await holding()
    await target.revise(*ROOTS[:2], STRANGER, revoked=(MINER.public,))
    await target.refuses_revision("signed by a key that is no root")


@attack
async def test_keys_a_revoked_miner_is_passed_over_within_one_poll():
    target = Target()
    await target.publish()
    await target.node.announce("miner", 60.0)
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    await target.revise(revoked=(MINER.public,))
    await refresh_authority(target.node)
    assert await find_participants(target.node, "miner") == []


@attack
async def test_keys_a_stranger_that_announces_itself_as_a_validator():
    target = Target()
    await target.publish()
    await target.new_node(key=STRANGER).announce("validator", 60.0)
    await target.new_node(key=VALIDATOR).announce("validator", 60.0)
    assert [item.key for item in await find_participants(target.node, "validator")] == [VALIDATOR.public]


@attack
async def test_keys_a_revoked_inviters_invitations_end():
    inviter = samples.key("inviter")
    target = Target(admission=samples.admission(policy="invite", inviters=(inviter.public,)))
    await target.publish()

    async def token(node: Node) -> bytes:
        return sign(Invite(run=node.run_id, key=node.key.public, expires_ms=1 << 50), inviter)

    await dataclasses.replace(target.node, proof=token).announce("miner", 60.0)
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    await target.revise(admission=samples.admission(policy="invite"), revoked=(inviter.public,))
    await refresh_authority(target.node)
    assert await find_participants(target.node, "miner") == []
    (line,) = target.log.named("announcement-refused")
    assert "no invitation by an inviter of this run" in line["error"]


@attack
async def test_keys_a_miner_without_proof_of_work_is_refused():
    async def short_work(node: Node) -> bytes:
        return do_work(node.run_id, STRANGER.public, 12, int(node.clock.now() * 1000) + 1000).to_bytes()

    target = Target(admission=samples.admission(credential="work", difficulty=12))
    await target.publish()
    await dataclasses.replace(target.node, proof=short_work).announce("miner", 60.0)
    assert await find_participants(target.node, "miner") == []
    (line,) = target.log.named("announcement-refused")
    assert "zero bits" in line["error"]


@attack
async def test_keys_refused_junk_is_not_fetched_again_at_once():
    target = Target()
    await target.publish()
    junk = [samples.key(str(number)).public for number in range(20)]
    for key in junk:
        await target.store.put(paths.participant(key), b"junk")
    for _ in range(5):
        await find_participants(target.node, "miner")
    assert len(target.log.named("announcement-refused")) == len(junk)
    await trio.sleep(11.0)
    await find_participants(target.node, "miner")
    assert len(target.log.named("announcement-refused")) == 2 * len(junk)


@attack
async def test_keys_a_stolen_trainer_key_cannot_sign_for_another_run():
    target = await holding()
    changes: dict[str, Any] = {"run": samples.digest("the thief's run")}
    await target.show(target.head(**changes))
    await target.refuses("a head of another run")
    with pytest.raises(ProtocolError):
        target.node.revisions.check(1, sign(target.head(), TRAINER))
