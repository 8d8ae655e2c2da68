"""Arbitrary software, endless data, extraneous data: unsigned bytes, too many bytes, and additional bytes."""

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from grailnode.run.creation import fetch_model, open_run
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest
from protocol.digest import content_digest
from protocol.encoding import pack, unpack
from protocol.errors import ProtocolError
from protocol.identity.signing import Envelope, sign
from protocol.objects import ObjectRef
from protocol.run import FileRef
from roles.participants import find_participants, list_announced_keys
from roles.ports import ObjectInfo, StoreError
from tests.support.attacked_nodes.follower import ROOTS, SECOND, STRANGER, VALIDATOR, AttackedFollower, follow_chain
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, small_weights
from tests.support.simulation.virtual_clock import simulated

NOT_SIGNED = "not signed by keys that may sign it"


# Arbitrary software installation


@simulated
async def test_arbitrary_a_patch_by_the_attacker():
    testbed = await follow_chain()
    await testbed.publish()
    other = await testbed.store.get(testbed.patch_path(2), 1 << 20)
    await testbed.store.put(testbed.patch_path(4), other)
    await testbed.assert_refuses_weights("not the bytes that the manifest names|could not be read|larger")


@simulated
async def test_arbitrary_a_bit_of_a_patch_is_flipped():
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.alter_object(testbed.patch_path(4), lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    await testbed.assert_refuses_weights("not the bytes that the manifest names")


@simulated
async def test_arbitrary_a_bit_of_an_anchor_is_flipped():
    testbed = await follow_chain()
    await testbed.restart_without_state()
    await testbed.alter_object(testbed.shard_path(0), lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    await testbed.assert_refuses_weights("not the bytes that the manifest names")


@pytest.mark.parametrize("key", [STRANGER, MINER, VALIDATOR, ROOTS[0]], ids=["stranger", "miner", "validator", "root"])
@simulated
async def test_arbitrary_a_head_by_a_key_of_another_role(key):
    testbed = await follow_chain()
    await testbed.put_head(testbed.head(epoch=1), key)
    await testbed.assert_refuses(NOT_SIGNED)


@simulated
async def test_arbitrary_a_head_signed_by_trainer_and_stranger():
    testbed = await follow_chain()
    await testbed.put_head(testbed.head(epoch=1), TRAINER, STRANGER)
    await testbed.assert_refuses(NOT_SIGNED)


@simulated
async def test_arbitrary_a_head_without_a_signature():
    testbed = await follow_chain()
    body = testbed.head(epoch=1).to_bytes()
    bare = pack({"body": body, "of": "head", "signatures": ()})
    await testbed.store.put(paths.head(TRAINER.public), bare)
    await testbed.assert_refuses("envelope.signatures")


@simulated
async def test_arbitrary_a_signature_from_another_head():
    testbed = await follow_chain()
    good = Envelope.from_bytes(sign(testbed.head(), TRAINER))
    forgery = good.model_copy(update={"body": testbed.head(epoch=9).to_bytes()})
    await testbed.store.put(paths.head(TRAINER.public), forgery.to_bytes())
    await testbed.assert_refuses("the signature does not hold")


@simulated
async def test_arbitrary_a_signature_on_another_kind_of_record():
    testbed = await follow_chain()
    body = Envelope.from_bytes(sign(testbed.head(epoch=1), TRAINER))
    relabelled = body.model_copy(update={"of": "announcement"})
    await testbed.store.put(paths.head(TRAINER.public), relabelled.to_bytes())
    await testbed.assert_refuses("holds a 'announcement'")


@simulated
async def test_arbitrary_a_manifest_by_a_stranger():
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.store.put(testbed.manifest_path(4), sign(testbed.chain.signed_manifests[4].record, STRANGER))
    await testbed.assert_refuses(NOT_SIGNED)


@simulated
async def test_arbitrary_weights_that_do_not_follow_from_the_signed_patch():
    testbed = await follow_chain()
    await testbed.publish(head=False)
    honest = testbed.chain.signed_manifests.pop().record
    await testbed.forge(patch=honest.patch, weights=samples.digest("other weights"))
    await testbed.assert_refuses_weights("not those that the trainer signed")


@simulated
async def test_arbitrary_another_genesis_than_the_run_names():
    testbed = AttackedFollower()
    testbed.genesis = small_weights(9)
    await testbed.publish()
    await testbed.restart()
    await testbed.assert_refuses("not the run's genesis weights")


@simulated
async def test_arbitrary_a_model_file_with_another_digest():
    testbed = await follow_chain()
    ref = FileRef(name="config.json", digest=content_digest(b"{}"), size=2)
    run = testbed.run.model_copy(update={"model": testbed.run.model.model_copy(update={"files": (ref,)})})
    for trainer in (TRAINER, SECOND):
        await testbed.store.put(paths.file(trainer.public, ref.digest), b"[]")
    with TemporaryDirectory() as folder, pytest.raises(StoreError, match="not the file that the run names"):
        await fetch_model(testbed.store, run, testbed.node.authority.trainers, Path(folder))


@simulated
async def test_arbitrary_a_run_manifest_with_another_id():
    testbed = AttackedFollower()
    other = testbed.run.model_copy(update={"group_size": 2})
    with pytest.raises(ProtocolError, match="is run"):
        open_run(sign(other, *ROOTS[:2]), testbed.run_id)


@simulated
async def test_arbitrary_a_run_manifest_that_one_root_of_two_signed():
    testbed = AttackedFollower()
    with pytest.raises(ProtocolError, match="not signed by 2 of its own roots"):
        open_run(sign(testbed.run, ROOTS[0]))


# Endless data


@simulated
async def test_endless_a_head_larger_than_its_limit():
    testbed = await follow_chain()
    await testbed.store.put(paths.head(TRAINER.public), bytes(10 * limits.MAX_HEAD_BYTES))
    await testbed.assert_refuses("head: 5242880 bytes where at most")


@simulated
async def test_endless_a_manifest_larger_than_its_limit():
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.store.put(testbed.manifest_path(4), bytes(2 * limits.MAX_RECORD_BYTES))
    await testbed.assert_refuses("manifests/.*: 16777216 bytes where at most")


@simulated
async def test_endless_a_patch_longer_than_its_manifest_says():
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.alter_object(testbed.patch_path(4), lambda data: data + bytes(1 << 20))
    await testbed.assert_refuses_weights("patches/.*: .* bytes where at most")


@simulated
async def test_endless_a_shard_longer_than_its_manifest_says():
    testbed = await follow_chain()
    await testbed.restart_without_state()
    await testbed.alter_object(testbed.shard_path(0), lambda data: data + bytes(1 << 20))
    await testbed.assert_refuses_weights("anchors/.*: .* bytes where at most")


@simulated
async def test_endless_a_length_prefix_of_gigabytes():
    testbed = await follow_chain()
    await testbed.store.put(paths.head(TRAINER.public), b"\xdd\xff\xff\xff\xff")
    await testbed.assert_refuses("more than .* values|cut off")


@simulated
async def test_endless_nesting():
    testbed = await follow_chain()
    await testbed.store.put(paths.head(TRAINER.public), b"\x91" * 100_000)
    await testbed.assert_refuses("nested deeper|cut off")


@simulated
async def test_endless_a_revision_larger_than_its_limit():
    testbed = await follow_chain()
    await testbed.store.put(paths.revision(testbed.run_id, 1), bytes(4 * limits.MAX_RUN_BYTES))
    await testbed.assert_refuses_revision("revisions/.*: 2097152 bytes where at most")
    await testbed.assert_follows()


@simulated
async def test_endless_announcements_are_passed_over():
    testbed = await follow_chain()
    await testbed.node.announce("miner", 60.0)
    await testbed.store.put(paths.participant(STRANGER.public), bytes(1 << 20))
    assert [item.key for item in await find_participants(testbed.node, "miner")] == [MINER.public]
    (line,) = testbed.log.named("announcement-refused")
    assert STRANGER.public.hex() in line["path"]


class Endless(MemoryStore):
    """A store whose listing of announcements never ends."""

    entries = 0

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        while True:
            self.entries += 1
            yield ObjectInfo(paths.participant(self.entries.to_bytes(32, "big")), 100)


@simulated
async def test_endless_a_listing_of_participants():
    testbed = AttackedFollower()
    testbed.store = Endless()
    testbed.node = testbed.new_node()
    assert len(await list_announced_keys(testbed.node)) <= 2 * limits.MAX_LISTED_PARTICIPANTS
    assert (
        testbed.store.entries == 2 * limits.MAX_LISTED_PARTICIPANTS
    )  # one listing from the beginning, one from elsewhere


@simulated
async def test_endless_a_listing_is_not_read_under_an_allowlist():
    testbed = AttackedFollower(admission=samples.admission(policy="allowlist", allowed=(MINER.public,)))
    testbed.store = Endless()
    testbed.node = testbed.new_node()
    assert await find_participants(testbed.node, "miner") == []
    assert testbed.store.entries == 0


# Extraneous data


@simulated
async def test_extraneous_bytes_after_a_head():
    testbed = await follow_chain()
    await testbed.alter_object(paths.head(TRAINER.public), lambda data: data + b"\0")
    await testbed.assert_refuses("bytes behind the value")


@simulated
async def test_extraneous_a_field_in_a_head_that_the_trainer_signed():
    testbed = await follow_chain()

    class Wider(Head):
        """A head with another field."""

        more: int = 1

    await testbed.put_head(Wider(**dict(testbed.head(epoch=1))), TRAINER)
    await testbed.assert_refuses("head.more")


@simulated
async def test_extraneous_a_signature_on_a_manifest():
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.store.put(testbed.manifest_path(4), sign(testbed.chain.signed_manifests[4].record, TRAINER, STRANGER))
    await testbed.assert_refuses(NOT_SIGNED)


@simulated
async def test_extraneous_a_signature_twice():
    testbed = await follow_chain()
    envelope = unpack(sign(testbed.head(epoch=1), TRAINER))
    await testbed.store.put(paths.head(TRAINER.public), pack(envelope | {"signatures": envelope["signatures"] * 2}))
    await testbed.assert_refuses("ascending order")


@simulated
async def test_extraneous_objects_beside_the_chain_change_nothing():
    testbed = await follow_chain()
    for prefix in (paths.manifests(TRAINER.public), paths.patches(TRAINER.public), paths.anchors(TRAINER.public)):
        for number in range(20):
            await testbed.store.put(f"{prefix}junk-{number}", bytes(1000))
    await testbed.publish()
    await testbed.assert_follows()


@simulated
async def test_extraneous_a_tensor_in_an_anchor_that_the_table_does_not_list():
    testbed = await follow_chain()
    shard = safetensors.write(small_weights(1) | {"extra": small_weights(1)["b"]})
    ref = ObjectRef(digest=content_digest(shard), size=len(shard))
    await testbed.store.put(paths.anchor(TRAINER.public, ref.digest), shard)
    testbed.chain.anchors.append(4)
    await testbed.forge(anchor=(ref,), patch=None)
    await testbed.assert_refuses_weights("the tensors differ from the manifest's table")


@simulated
async def test_extraneous_a_tensor_in_two_shards():
    testbed = await follow_chain()
    shard = safetensors.write(small_weights(1))
    ref = ObjectRef(digest=content_digest(shard), size=len(shard))
    await testbed.store.put(paths.anchor(TRAINER.public, ref.digest), shard)
    testbed.chain.anchors.append(4)
    await testbed.forge(anchor=(ref, ref), patch=None)
    await testbed.assert_refuses_weights("in two shards")


@simulated
async def test_extraneous_a_tensor_that_is_new_in_this_version():
    testbed = await follow_chain()
    rows = testbed.chain.signed_manifests[-1].record.tensors
    await testbed.forge(tensors=(*rows, ("z", "BF16", (1,))))
    await testbed.assert_refuses("other tensors than the version before")


@simulated
async def test_extraneous_participants_are_not_fetched_under_an_allowlist():
    testbed = AttackedFollower(admission=samples.admission(policy="allowlist", allowed=(MINER.public,)))
    await testbed.publish()
    await testbed.node.announce("miner", 60.0)
    for number in range(50):
        await testbed.store.put(paths.participant(samples.digest(str(number))), b"junk")
    assert [item.key for item in await find_participants(testbed.node, "miner")] == [MINER.public]
    assert not testbed.log.named("announcement-refused")


def test_extraneous_an_envelope_has_no_unsigned_fields() -> None:
    """Every field that a follower acts on is in the signed body."""
    assert set(Envelope.model_fields) == {"body", "of", "signatures"}
    assert {"patch", "anchor", "weights", "tensors"} <= set(Manifest.model_fields)
