"""Malicious mirrors and mix-and-match: spaces that lie, each in its own way, and true records in wrong combinations."""

from dataclasses import replace

from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.identity.authority import Revision
from protocol.identity.signing import open_announced, sign
from roles.authority_updates import refresh_authority
from roles.participants import find_participants
from tests.support.attacks.target import ROOTS, SECOND, STRANGER, SUCCESSOR, VALIDATOR, Target, attack, holding
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER
from tests.support.simulation.network import Log

# Malicious mirrors


@attack
async def test_mirror_one_of_two_trainers_spaces_lies():
    target = await holding()
    await target.publish()
    await target.mirror(SECOND)
    await target.store.put(paths.head(TRAINER.public), b"\xc1")
    await target.goes_on()


@attack
async def test_mirror_one_of_two_trainers_spaces_is_frozen():
    target = await holding()
    frozen_head = target.head(expires_ms=int(target.clock.now() * 1000))
    await target.publish()
    await target.mirror(SECOND)
    await target.show(frozen_head)
    await target.goes_on()


@attack
async def test_mirror_one_of_two_trainers_spaces_is_empty():
    target = await holding()
    await target.publish()
    await target.mirror(SECOND)
    async for item in target.store.list(TRAINER.public.hex()):
        await target.store.delete(item.path)
    await target.goes_on()


@attack
async def test_mirror_that_alternates_between_good_and_old_heads():
    target = await holding()
    for _ in range(3):
        await target.publish()
        good = await target.store.get(paths.head(TRAINER.public), 1 << 20)
        await target.show(target.head(0))
        await target.refuses("version 0 behind")
        await target.store.put(paths.head(TRAINER.public), good)
        await target.goes_on()


@attack
async def test_mirror_of_another_run_by_the_same_trainer():
    target = await holding()
    await target.show(target.head(run=samples.digest("another run")))
    await target.refuses("of another run")


@attack
async def test_mirror_a_meeting_point_with_a_forged_revision_and_a_validator_with_the_true_one():
    target = await holding()
    await target.revise(STRANGER, SECOND, trainers=(STRANGER.public,))
    await target.revise(at=paths.revision_copy(VALIDATOR.public, 1), revoked=(STRANGER.public,))
    await refresh_authority(target.node)
    assert target.node.authority.revoked == (STRANGER.public,)
    assert target.node.authority.trainers == (TRAINER.public, SECOND.public)
    (line,) = target.log.named("revision-refused")
    assert "signed by 0 roots where 2 must sign" in line["error"]


@attack
async def test_mirror_a_validator_with_a_revision_of_another_run():
    target = await holding()
    await target.revise(at=paths.revision_copy(VALIDATOR.public, 1), run=samples.digest("another run"))
    await target.refuses_revision("of another run")


@attack
async def test_mirror_strangers_spaces_are_not_read_for_revisions():
    target = await holding()
    await target.revise(at=paths.revision_copy(STRANGER.public, 1), revoked=(MINER.public,))
    await refresh_authority(target.node)
    assert target.node.revisions.number == 0


@attack
async def test_mirror_an_honest_validator_passes_a_revision_on():
    target = await holding()
    await target.revise(revoked=(STRANGER.public,))
    validator = target.new_node(key=VALIDATOR, state=type(target.state)(), log=Log("validator"))
    await refresh_authority(validator)
    await target.store.delete(paths.revision(target.run_id, 1))  # as a meeting point that hides it
    await refresh_authority(target.node)
    assert target.node.authority.revoked == (STRANGER.public,)


@attack
async def test_mirror_a_miner_passes_nothing_on():
    target = await holding()
    await target.revise(revoked=(STRANGER.public,))
    await refresh_authority(target.node)
    assert not [item.path async for item in target.store.list(MINER.public.hex())]


# Mix-and-match


@attack
async def test_mix_the_newest_head_with_an_older_manifest():
    target = await holding()
    await target.publish()
    older_manifest = await target.store.get(target.manifest_path(3), 1 << 20)
    await target.store.put(target.manifest_path(4), older_manifest)
    await target.refuses("manifest 4: not the one that the head lists")


@attack
async def test_mix_two_manifests_in_each_others_places():
    target = await holding()
    await target.cold()
    first_path, second_path = target.manifest_path(1), target.manifest_path(2)
    first, second = await target.store.get(first_path, 1 << 20), await target.store.get(second_path, 1 << 20)
    await target.store.put(first_path, second)
    await target.store.put(second_path, first)
    await target.refuses("not the one that the head lists")


@attack
async def test_mix_a_patch_of_another_version():
    target = await holding(2)
    target.chain.signed.pop()
    third = await target.forge(patch=target.chain.signed[1].record.patch, weights=samples.digest("third"))
    assert third.record.version == 2
    await target.cold()
    await target.refuses_to_hold("made for other weights than these")


@attack
async def test_mix_an_anchor_of_another_version():
    target = await holding()
    await target.publish(anchor=True)
    await target.cold()
    old = await target.store.get(target.shard_path(0), 1 << 20)
    await target.store.put(target.shard_path(4), old)
    await target.refuses_to_hold("not the bytes that the manifest names")


@attack
async def test_mix_a_manifest_of_another_run_of_the_same_trainer():
    target = await holding()
    await target.forge(run=samples.digest("another run"))
    await target.refuses("of another run, version or epoch")


@attack
async def test_mix_a_manifest_of_a_later_epoch_under_an_earlier_head():
    target = await holding()
    await target.forge(epoch=9)
    await target.refuses("of another run, version or epoch")


@attack
async def test_mix_a_manifest_that_continues_another_chain():
    target = await holding()
    await target.forge(previous=samples.digest("another chain"))
    await target.refuses("does not continue the manifest before it")
    assert any("signed two histories" in line for line in target.node.alarms.drain())


@attack
async def test_mix_two_heads_for_one_version_is_an_alarm():
    target = await holding()
    fork = open_announced(
        sign(target.chain.signed[3].record.model_copy(update={"optimizer_step": 99}), TRAINER), Manifest
    )
    digests = tuple(manifest.digest for manifest in (*target.chain.signed[:3], fork))
    await target.show(target.head(manifests=digests))
    await target.refuses("another manifest for trusted version 3")
    (line,) = target.node.alarms.drain()
    assert f"trainer {TRAINER.public.hex()[:16]} signed two histories" in line
    assert target.node.alarms.drain() == ()  # one alarm only
    assert target.log.named("alarm")


@attack
async def test_mix_a_window_that_goes_back():
    target = await holding()
    await target.forge(first_window=0)
    await target.refuses("a lower epoch or window than the version before")


@attack
async def test_mix_an_announcement_at_another_participants_path():
    target = Target()
    await target.publish()
    await target.node.announce("miner", 60.0)
    data = await target.store.get(paths.participant(MINER.public), 1 << 16)
    await target.store.put(paths.participant(STRANGER.public), data)
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    (line,) = target.log.named("announcement-refused")
    assert "not signed by keys that may sign it" in line["error"]


@attack
async def test_mix_an_announcement_of_another_run():
    target = Target()
    await target.publish()
    other = replace(target.new_node(), run_id=samples.digest("another run"))
    await other.announce("miner", 60.0)
    assert await find_participants(target.node, "miner") == []
    (line,) = target.log.named("announcement-refused")
    assert "of another run" in line["error"]


@attack
async def test_mix_a_second_revision_with_a_known_number():
    target = await holding()
    await target.revise(note="one")
    fork: Revision = target.next_revision(note="the other")
    await refresh_authority(target.node)
    await target.store.put(paths.revision_copy(VALIDATOR.public, 1), sign(fork, *ROOTS[1:]))
    await target.refuses_revision("the roots signed two histories", event="alarm")
    assert target.node.revisions.number == 1
    assert len(target.node.alarms.drain()) == 1


@attack
async def test_mix_two_new_revisions_with_one_number():
    target = await holding()
    await target.revise(trainers=(SUCCESSOR.public,))
    await target.revise(at=paths.revision_copy(VALIDATOR.public, 1), trainers=(STRANGER.public,))
    await target.refuses_revision("none is obeyed", event="alarm")
    assert target.node.revisions.number == 0
    await target.publish()
    await target.goes_on()
