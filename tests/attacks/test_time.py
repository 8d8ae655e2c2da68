"""Fast-forward, freeze, rollback: storage that shows records that are too new, always the same, or old."""

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.verifier import Trust
from protocol.errors import ExpiredError, ProtocolError
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import sign
from roles.authority_updates import load_authority, refresh_authority
from roles.participants import find_participants
from roles.policy.follower import TRUST_PATH, Follower
from tests.roles.test_follower import equal
from tests.support.attacks.target import ROOTS, SECOND, STRANGER, SUCCESSOR, VALIDATOR, Target, attack, holding
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER

LAST_EPOCH = (1 << 53) - 1


# Fast-forward


@attack
async def test_fast_forward_to_the_last_epoch():
    target = await holding()
    await target.show(target.head(epoch=LAST_EPOCH), STRANGER)
    await target.refuses("not signed by keys that may sign it")
    await target.show(target.head(epoch=1))
    await target.goes_on()


@attack
async def test_fast_forward_a_head_that_expires_too_late():
    target = await holding()
    await target.show(target.head(expires_ms=LAST_EPOCH))
    await target.refuses("valid for more than the 3600 s")


@attack
async def test_fast_forward_a_revision_that_skips_numbers():
    target = await holding()
    await target.revise(number=4096)
    await target.refuses_revision("revision 4096 stands in its place")


@attack
async def test_fast_forward_a_head_of_a_revision_that_does_not_exist():
    target = await holding()
    await target.show(target.head(revision=4096))
    await target.refuses("made under revision 4096 .* storage hides the others")


@attack
async def test_fast_forward_by_a_stolen_key_ends_with_a_rewind_of_the_epoch():
    target = await holding()
    await target.show(target.head(epoch=LAST_EPOCH))
    await target.follow()
    point = ChainPoint(version=3, digest=target.chain.signed[3].digest)
    await target.revise(trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,), rewind=point)
    await target.mirror(SUCCESSOR, epoch=1, revision=1)
    await refresh_authority(target.node)
    await target.goes_on()
    trust = Trust.from_bytes(await target.state.get(TRUST_PATH, 1 << 20))
    assert (trust.epoch, trust.version, trust.revision) == (1, 3, 1)


@attack
async def test_fast_forward_by_a_stolen_key_ends_with_a_rewind_of_the_versions():
    target = await holding()
    honest_manifest = target.chain.signed[3]
    await target.publish(3)  # the thief's
    await target.follow()
    thiefs_weights = target.chain.weights[6]
    target.chain.signed, target.chain.weights = target.chain.signed[:4], target.chain.weights[:4]
    await target.revise(
        trainers=(SUCCESSOR.public,),
        revoked=(TRAINER.public,),
        rewind=ChainPoint(version=3, digest=honest_manifest.digest),
    )
    await target.mirror(SUCCESSOR, epoch=1, revision=1)
    await refresh_authority(target.node)
    await target.goes_on()
    assert target.follower.newest is not None and target.follower.newest.version == 3
    assert not equal(target.follower.newest.weights, thiefs_weights)
    await target.restart()
    await target.goes_on()


@attack
async def test_fast_forward_of_a_rewound_node_back_to_the_thiefs_chain():
    target = await holding()
    old_head = target.head(epoch=5)
    await target.revise(
        trainers=(SUCCESSOR.public, TRAINER.public),
        rewind=ChainPoint(version=3, digest=target.chain.signed[3].digest),
    )
    await refresh_authority(target.node)
    await target.mirror(SUCCESSOR, epoch=6, revision=1)
    await target.follow()
    await target.store.delete(paths.head(SUCCESSOR.public))
    await target.show(old_head)
    with pytest.raises(Exception, match="head"):
        await target.follower.refresh()
    assert target.follower.chain.trust is not None and target.follower.chain.trust.epoch == 6


# Indefinite freeze


@attack
async def test_freeze_the_same_head_for_ever():
    target = await holding()
    assert target.follower.version_for(3) == 3
    await trio.sleep(3601.0)
    await target.refuses("has expired")
    with pytest.raises(ExpiredError):
        target.follower.version_for(3)


@attack
async def test_freeze_by_withholding_the_head():
    target = await holding()
    await target.store.delete(paths.head(TRAINER.public))
    await target.refuses("head")
    assert target.follower.version_for(3) == 3
    await trio.sleep(3601.0)
    with pytest.raises(ExpiredError):
        target.follower.version_for(3)


@attack
async def test_freeze_of_a_node_that_starts_again():
    target = await holding()
    await trio.sleep(3601.0)
    await target.restart()
    await target.refuses("has expired")


@attack
async def test_freeze_by_withholding_a_manifest():
    target = await holding()
    await target.publish()
    await target.store.delete(target.manifest_path(4))
    await target.refuses("manifests")


@attack
async def test_freeze_by_withholding_a_patch():
    target = await holding()
    await target.publish()
    await target.store.delete(target.patch_path(4))
    await target.refuses_to_hold("patches")


@attack
async def test_freeze_of_a_revocation_at_the_meeting_point():
    target = await holding()
    copy = paths.revision_copy(VALIDATOR.public, 1)
    await target.revise(at=copy, trainers=(SUCCESSOR.public,), revoked=(TRAINER.public,))
    await refresh_authority(target.node)
    assert target.node.authority.trainers == (SUCCESSOR.public,)


@attack
async def test_freeze_of_a_revocation_by_the_revoked_trainer():
    target = await holding()
    await target.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await target.store.put(paths.revision_copy(TRAINER.public, 1), b"nothing new here")
    await refresh_authority(target.node)
    assert target.node.authority.revoked == (TRAINER.public,)


@attack
async def test_freeze_of_a_revision_that_the_head_names():
    target = await holding()
    await target.publish(head=False)
    await target.show(target.head(revision=1))
    await target.refuses("made under revision 1 .* storage hides the others")
    await target.revise()
    await refresh_authority(target.node)
    await target.goes_on()


@attack
async def test_freeze_by_a_trainers_clock_that_is_ahead():
    target = await holding()
    await target.show(target.head(expires_ms=int(target.clock.now() * 1000) + 2 * 3_600_000))
    await target.refuses("valid for more")


# Rollback


@attack
async def test_rollback_to_an_older_head():
    target = await holding()
    await target.show(target.head(2))
    await target.refuses("epoch 0 version 2 behind epoch 0 version 3")


@attack
async def test_rollback_to_an_older_epoch():
    target = await holding()
    await target.show(target.head(epoch=4))
    await target.follow()
    await target.show(target.head(epoch=3))
    await target.refuses("epoch 3 version 3 behind epoch 4 version 3")


@attack
async def test_rollback_of_a_node_that_starts_again():
    target = await holding()
    await target.restart()
    await target.show(target.head(1))
    await target.refuses("version 1 behind")


@attack
async def test_rollback_under_a_newer_epoch():
    target = await holding()
    await target.show(target.head(1, epoch=7))
    await target.refuses("version 1 behind")


@attack
async def test_rollback_to_a_backup_of_everything():
    target = await holding(1)
    backup = MemoryStore()
    async for item in target.store.list(""):
        await backup.put(item.path, await target.store.get(item.path, 1 << 30))
    await target.publish(2)
    await target.follow()
    target.store = backup
    target.node = target.new_node()
    target.follower = await Follower.open(target.node)
    await target.refuses("version 1 behind")


@attack
async def test_rollback_by_damaging_the_nodes_trust():
    target = await holding()
    await target.state.put(TRUST_PATH, b"\xc1")
    with pytest.raises(ProtocolError):
        await target.restart()


@attack
async def test_rollback_within_the_listed_versions_is_a_fork():
    target = await holding()
    digests = tuple(manifest.digest for manifest in target.chain.signed[:3])
    await target.show(target.head(manifests=(*digests, samples.digest("another version 3"))))
    await target.refuses("another manifest for trusted version 3")


@attack
async def test_rollback_of_a_revocation():
    target = await holding()
    first = await target.revise(revoked=(STRANGER.public,))
    await refresh_authority(target.node)
    await target.store.put(paths.revision(target.run_id, 2), sign(first, *ROOTS[:2]))
    await target.refuses_revision("revision 1 stands in its place")


@attack
async def test_rollback_of_a_revocation_by_withholding_it():
    target = await holding()
    await target.revise(trainers=(SECOND.public,), revoked=(TRAINER.public,))
    await refresh_authority(target.node)
    await target.store.delete(paths.revision(target.run_id, 1))
    await target.restart()  # it reads its own state
    assert target.node.authority.revoked == (TRAINER.public,)
    await target.refuses("head")


@attack
async def test_rollback_of_a_revocation_by_damaging_the_nodes_state():
    target = await holding()
    await target.revise(revoked=(STRANGER.public,))
    await refresh_authority(target.node)
    await target.state.put("authority/0000000001", sign(target.run, *ROOTS))
    with pytest.raises(ProtocolError):
        await load_authority(target.new_node())


@attack
async def test_rollback_to_an_announcement_that_has_expired():
    target = Target()
    await target.publish()
    await target.node.announce("miner", 60.0)
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    await trio.sleep(61.0)
    assert await find_participants(target.node, "miner") == []
    (line,) = target.log.named("announcement-refused")
    assert "expired" in line["error"]
