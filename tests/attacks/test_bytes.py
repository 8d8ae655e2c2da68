"""Arbitrary software, endless data, extraneous data: unsigned bytes, too many bytes, and additional bytes."""

from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from grailnode.run.creation import fetch_model, open_run
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, ObjectRef
from protocol.digest import content_digest
from protocol.encoding import pack, unpack
from protocol.errors import ProtocolError
from protocol.identity.signing import Envelope, sign
from protocol.run import FileRef
from roles.participants import find_participants, list_announced_keys
from roles.ports import ObjectInfo, StoreError
from tests.support.attacks.target import ROOTS, SECOND, STRANGER, VALIDATOR, Target, attack, holding
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, small_weights

NOT_SIGNED = "not signed by keys that may sign it"


# Arbitrary software installation


@attack
async def test_arbitrary_a_patch_by_the_attacker():
    target = await holding()
    await target.publish()
    other = await target.store.get(target.patch_path(2), 1 << 20)
    await target.store.put(target.patch_path(4), other)
    await target.refuses_to_hold("not the bytes that the manifest names|could not be read|larger")


@attack
async def test_arbitrary_a_bit_of_a_patch_is_flipped():
    target = await holding()
    await target.publish()
    await target.bend(target.patch_path(4), lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    await target.refuses_to_hold("not the bytes that the manifest names")


@attack
async def test_arbitrary_a_bit_of_an_anchor_is_flipped():
    target = await holding()
    await target.cold()
    await target.bend(target.shard_path(0), lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    await target.refuses_to_hold("not the bytes that the manifest names")


@pytest.mark.parametrize("key", [STRANGER, MINER, VALIDATOR, ROOTS[0]], ids=["stranger", "miner", "validator", "root"])
def test_arbitrary_a_head_by_a_key_of_another_role(key):
    @attack
    async def scenario():
        target = await holding()
        await target.show(target.head(epoch=1), key)
        await target.refuses(NOT_SIGNED)

    scenario()


@attack
async def test_arbitrary_a_head_signed_by_trainer_and_stranger():
    target = await holding()
    await target.show(target.head(epoch=1), TRAINER, STRANGER)
    await target.refuses(NOT_SIGNED)


@attack
async def test_arbitrary_a_head_without_a_signature():
    target = await holding()
    body = target.head(epoch=1).to_bytes()
    bare = pack({"body": body, "of": "head", "signatures": ()})
    await target.store.put(paths.head(TRAINER.public), bare)
    await target.refuses("envelope.signatures")


@attack
async def test_arbitrary_a_signature_from_another_head():
    target = await holding()
    good = Envelope.from_bytes(sign(target.head(), TRAINER))
    forged = good.model_copy(update={"body": target.head(epoch=9).to_bytes()})
    await target.store.put(paths.head(TRAINER.public), forged.to_bytes())
    await target.refuses("the signature does not hold")


@attack
async def test_arbitrary_a_signature_on_another_kind_of_record():
    target = await holding()
    body = Envelope.from_bytes(sign(target.head(epoch=1), TRAINER))
    relabelled = body.model_copy(update={"of": "announcement"})
    await target.store.put(paths.head(TRAINER.public), relabelled.to_bytes())
    await target.refuses("holds a 'announcement'")


@attack
async def test_arbitrary_a_manifest_by_a_stranger():
    target = await holding()
    await target.publish()
    await target.store.put(target.manifest_path(4), sign(target.chain.signed[4].record, STRANGER))
    await target.refuses(NOT_SIGNED)


@attack
async def test_arbitrary_weights_that_do_not_follow_from_the_signed_patch():
    target = await holding()
    await target.publish(head=False)
    honest = target.chain.signed.pop().record
    await target.forge(patch=honest.patch, weights=samples.digest("other weights"))
    await target.refuses_to_hold("not those that the trainer signed")


@attack
async def test_arbitrary_another_genesis_than_the_run_names():
    target = Target()
    target.genesis = small_weights(9)
    await target.publish()
    await target.restart()
    await target.refuses("not the run's genesis weights")


@attack
async def test_arbitrary_a_model_file_with_another_digest():
    target = await holding()
    ref = FileRef(name="config.json", digest=content_digest(b"{}"), size=2)
    run = target.run.model_copy(update={"model": target.run.model.model_copy(update={"files": (ref,)})})
    for trainer in (TRAINER, SECOND):
        await target.store.put(paths.file(trainer.public, ref.digest), b"[]")
    with TemporaryDirectory() as folder, pytest.raises(StoreError, match="not the file that the run names"):
        await fetch_model(target.store, run, target.node.authority.trainers, Path(folder))


@attack
async def test_arbitrary_a_run_manifest_with_another_id():
    target = Target()
    other = target.run.model_copy(update={"group_size": 2})
    with pytest.raises(ProtocolError, match="is run"):
        open_run(sign(other, *ROOTS[:2]), target.run_id)


@attack
async def test_arbitrary_a_run_manifest_that_one_root_of_two_signed():
    target = Target()
    with pytest.raises(ProtocolError, match="not signed by 2 of its own roots"):
        open_run(sign(target.run, ROOTS[0]))


# Endless data


@attack
async def test_endless_a_head_larger_than_its_limit():
    target = await holding()
    await target.store.put(paths.head(TRAINER.public), bytes(10 * limits.MAX_HEAD_BYTES))
    await target.refuses("")


@attack
async def test_endless_a_manifest_larger_than_its_limit():
    target = await holding()
    await target.publish()
    await target.store.put(target.manifest_path(4), bytes(2 * limits.MAX_RECORD_BYTES))
    await target.refuses("")


@attack
async def test_endless_a_patch_longer_than_its_manifest_says():
    target = await holding()
    await target.publish()
    await target.bend(target.patch_path(4), lambda data: data + bytes(1 << 20))
    await target.refuses_to_hold("")


@attack
async def test_endless_a_shard_longer_than_its_manifest_says():
    target = await holding()
    await target.cold()
    await target.bend(target.shard_path(0), lambda data: data + bytes(1 << 20))
    await target.refuses_to_hold("")


@attack
async def test_endless_a_length_prefix_of_gigabytes():
    target = await holding()
    await target.store.put(paths.head(TRAINER.public), b"\xdd\xff\xff\xff\xff")
    await target.refuses("more than .* values|cut off")


@attack
async def test_endless_nesting():
    target = await holding()
    await target.store.put(paths.head(TRAINER.public), b"\x91" * 100_000)
    await target.refuses("nested deeper|cut off")


@attack
async def test_endless_a_revision_larger_than_its_limit():
    target = await holding()
    await target.store.put(paths.revision(target.run_id, 1), bytes(4 * limits.MAX_RUN_BYTES))
    await target.refuses_revision("")
    await target.goes_on()


@attack
async def test_endless_announcements_are_passed_over():
    target = await holding()
    await target.node.announce("miner", 60.0)
    await target.store.put(paths.participant(STRANGER.public), bytes(1 << 20))
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    (line,) = target.log.named("announcement-refused")
    assert STRANGER.public.hex() in line["path"]


class Endless(MemoryStore):
    """A store whose listing of announcements never ends."""

    entries = 0

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        while True:
            self.entries += 1
            yield ObjectInfo(paths.participant(self.entries.to_bytes(32, "big")), 100)


@attack
async def test_endless_a_listing_of_participants():
    target = Target()
    target.store = Endless()
    target.node = target.new_node()
    assert len(await list_announced_keys(target.node)) <= 2 * limits.MAX_LISTED_PARTICIPANTS
    assert (
        target.store.entries == 2 * limits.MAX_LISTED_PARTICIPANTS
    )  # one listing from the beginning, one from elsewhere


@attack
async def test_endless_a_listing_is_not_read_under_an_allowlist():
    target = Target(admission=samples.admission(policy="allowlist", allowed=(MINER.public,)))
    target.store = Endless()
    target.node = target.new_node()
    assert await find_participants(target.node, "miner") == []
    assert target.store.entries == 0


# Extraneous data


@attack
async def test_extraneous_bytes_after_a_head():
    target = await holding()
    await target.bend(paths.head(TRAINER.public), lambda data: data + b"\0")
    await target.refuses("bytes behind the value")


@attack
async def test_extraneous_a_field_in_a_head_that_the_trainer_signed():
    target = await holding()

    class Wider(Head):
        """A head with another field."""

        more: int = 1

    await target.show(Wider(**dict(target.head(epoch=1))), TRAINER)
    await target.refuses("head.more")


@attack
async def test_extraneous_a_signature_on_a_manifest():
    target = await holding()
    await target.publish()
    await target.store.put(target.manifest_path(4), sign(target.chain.signed[4].record, TRAINER, STRANGER))
    await target.refuses(NOT_SIGNED)


@attack
async def test_extraneous_a_signature_twice():
    target = await holding()
    envelope = unpack(sign(target.head(epoch=1), TRAINER))
    await target.store.put(paths.head(TRAINER.public), pack(envelope | {"signatures": envelope["signatures"] * 2}))
    await target.refuses("ascending order")


@attack
async def test_extraneous_objects_beside_the_chain_change_nothing():
    target = await holding()
    for prefix in (paths.manifests(TRAINER.public), paths.patches(TRAINER.public), paths.anchors(TRAINER.public)):
        for number in range(20):
            await target.store.put(f"{prefix}junk-{number}", bytes(1000))
    await target.publish()
    await target.goes_on()


@attack
async def test_extraneous_a_tensor_in_an_anchor_that_the_table_does_not_list():
    target = await holding()
    shard = safetensors.write(small_weights(1) | {"extra": small_weights(1)["b"]})
    ref = ObjectRef(digest=content_digest(shard), size=len(shard))
    await target.store.put(paths.anchor(TRAINER.public, ref.digest), shard)
    target.chain.anchors.append(4)
    await target.forge(anchor=(ref,), patch=None)
    await target.refuses_to_hold("the tensors differ from the manifest's table")


@attack
async def test_extraneous_a_tensor_in_two_shards():
    target = await holding()
    shard = safetensors.write(small_weights(1))
    ref = ObjectRef(digest=content_digest(shard), size=len(shard))
    await target.store.put(paths.anchor(TRAINER.public, ref.digest), shard)
    target.chain.anchors.append(4)
    await target.forge(anchor=(ref, ref), patch=None)
    await target.refuses_to_hold("in two shards")


@attack
async def test_extraneous_a_tensor_that_is_new_in_this_version():
    target = await holding()
    rows = target.chain.signed[-1].record.tensors
    await target.forge(tensors=(*rows, ("z", "BF16", (1,))))
    await target.refuses("other tensors than the version before")


@attack
async def test_extraneous_participants_are_not_fetched_under_an_allowlist():
    target = Target(admission=samples.admission(policy="allowlist", allowed=(MINER.public,)))
    await target.publish()
    await target.node.announce("miner", 60.0)
    for number in range(50):
        await target.store.put(paths.participant(samples.digest(str(number))), b"junk")
    assert [item.key for item in await find_participants(target.node, "miner")] == [MINER.public]
    assert not target.log.named("announcement-refused")


def test_extraneous_an_envelope_has_no_unsigned_fields() -> None:
    """Every field that a follower acts on is in the signed body."""
    assert set(Envelope.model_fields) == {"body", "of", "signatures"}
    assert {"patch", "anchor", "weights", "tensors"} <= set(Manifest.model_fields)
