"""Arbitrary software, endless data, extraneous data: false bytes, too many bytes, and additional bytes; and the heads
and manifests that are too new, too old, or of another place.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from grailnode.run.creation import open_run
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.chain import safetensors
from protocol.encoding import content_digest, pack, unpack
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.objects import ObjectRef
from roles.participants import list_announced_keys
from roles.ports import ObjectInfo
from tests.support.attacked_nodes.follower import HOUR_MS, ROOTS, STRANGER, VALIDATOR, AttackedFollower, follow_chain
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, small_weights

NOT_SIGNED = "not signed by keys that may sign it"
LAST_EPOCH = (1 << 53) - 1


def signed_head(*keys: Any, newest: int | None = None, **changes: Any) -> Callable[[AttackedFollower], bytes]:
    """Return a function that signs the testbed's head with changes, by the trainer if no keys are given."""
    return lambda testbed: sign(testbed.head(newest, **changes), *(keys or (TRAINER,)))


def head_with_two_signatures(testbed: AttackedFollower) -> bytes:
    envelope = unpack(sign(testbed.head(epoch=1), TRAINER))
    return pack(envelope | {"signatures": envelope["signatures"] * 2})


def unsigned_head(testbed: AttackedFollower) -> bytes:
    return pack({"body": testbed.head(epoch=1).to_bytes(), "of": "head", "signatures": ()})


def head_that_expires_in_two_hours(testbed: AttackedFollower) -> bytes:
    return sign(testbed.head(expires_ms=int(testbed.clock.now() * 1000) + 2 * HOUR_MS), TRAINER)


FALSE_HEADS: dict[str, tuple[Callable[[AttackedFollower], bytes], str]] = {
    "arbitrary: signed by a stranger": (signed_head(STRANGER, epoch=1), NOT_SIGNED),
    "arbitrary: signed by a miner": (signed_head(MINER, epoch=1), NOT_SIGNED),
    "arbitrary: signed by a validator": (signed_head(VALIDATOR, epoch=1), NOT_SIGNED),
    "arbitrary: signed by a root": (signed_head(ROOTS[0], epoch=1), NOT_SIGNED),
    "arbitrary: signed by trainer and stranger": (signed_head(TRAINER, STRANGER, epoch=1), NOT_SIGNED),
    "arbitrary: without a signature": (unsigned_head, "envelope.signatures"),
    "arbitrary: cut off": (lambda testbed: sign(testbed.head(), TRAINER)[:-1], "cut off"),
    "endless: larger than its limit": (
        lambda testbed: bytes(10 * limits.MAX_HEAD_BYTES),
        "head: 5242880 bytes where at most",
    ),
    "endless: a length prefix of gigabytes": (lambda testbed: b"\xdd\xff\xff\xff\xff", "more than .* values|cut off"),
    "extraneous: a signature twice": (head_with_two_signatures, "ascending order"),
    "fast-forward: the last epoch, by a stranger": (signed_head(STRANGER, epoch=LAST_EPOCH), NOT_SIGNED),
    "fast-forward: it expires at the end of time": (
        signed_head(expires_ms=LAST_EPOCH),
        "valid for more than the 3600 s",
    ),
    "fast-forward: it expires in two hours": (head_that_expires_in_two_hours, "valid for more than the 3600 s"),
    "fast-forward: a revision that does not exist": (
        signed_head(revision=4096),
        "made under revision 4096 .* storage hides the others",
    ),
    "rollback: an older version": (signed_head(newest=2), "epoch 0 version 2 behind epoch 0 version 3"),
    "rollback: an older version under a newer epoch": (signed_head(newest=1, epoch=7), "version 1 behind"),
    "mix: of another run of the same trainer": (
        signed_head(run=samples.digest("another run")),
        "a head of another run",
    ),
}


@pytest.mark.parametrize("has_restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize(("head", "refusal"), FALSE_HEADS.values(), ids=FALSE_HEADS)
async def test_a_false_head_is_refused_and_a_good_one_followed(
    head: Callable[[AttackedFollower], bytes], refusal: str, has_restarted: bool
) -> None:
    testbed = await follow_chain()
    if has_restarted:
        await testbed.restart()
    await testbed.store.put(paths.head(TRAINER.public), head(testbed))
    await testbed.assert_refuses(refusal)
    await testbed.put_head(testbed.head(epoch=1))
    await testbed.assert_follows()


FALSE_MANIFESTS: dict[str, tuple[Callable[[AttackedFollower], bytes | None], str]] = {
    "arbitrary: signed by a stranger": (
        lambda testbed: sign(testbed.chain.signed_manifests[4].record, STRANGER),
        NOT_SIGNED,
    ),
    "extraneous: signed by a stranger, too": (
        lambda testbed: sign(testbed.chain.signed_manifests[4].record, TRAINER, STRANGER),
        NOT_SIGNED,
    ),
    "endless: larger than its limit": (
        lambda testbed: bytes(2 * limits.MAX_RECORD_BYTES),
        "manifests/.*: 16777216 bytes where at most",
    ),
    "freeze: none": (lambda testbed: None, "manifests"),
    "mix: that of the version before": (
        lambda testbed: testbed.chain.signed_manifests[3].data,
        "manifest 4: not the one that the head lists",
    ),
}


@pytest.mark.parametrize(("manifest", "refusal"), FALSE_MANIFESTS.values(), ids=FALSE_MANIFESTS)
async def test_a_false_manifest_of_a_new_version_is_refused(
    manifest: Callable[[AttackedFollower], bytes | None], refusal: str
) -> None:
    testbed = await follow_chain()
    await testbed.publish()
    await testbed.replace(testbed.manifest_path(4), manifest(testbed))
    await testbed.assert_refuses(refusal)
    assert testbed.follower.version_for(3) == 3
    await testbed.store.put(testbed.manifest_path(4), testbed.chain.signed_manifests[4].data)
    await testbed.assert_follows()


FALSE_WEIGHTS: dict[str, tuple[Callable[[bytes, bytes], bytes | None], str]] = {
    "arbitrary: a flipped bit": (
        lambda honest, earlier: honest[:-1] + bytes([honest[-1] ^ 1]),
        "not the bytes of this digest",
    ),
    "endless: longer than its manifest says": (
        lambda honest, earlier: honest + bytes(1 << 20),
        "(patches|anchors)/.*: larger than the .* bytes that were named",
    ),
    "freeze: none": (lambda honest, earlier: None, "patches|anchors"),
    "mix: of another version": (
        lambda honest, earlier: earlier,
        "not the bytes of this digest|could not be read|larger",
    ),
}


@pytest.mark.parametrize("is_anchor", [False, True], ids=["patch", "anchor"])
@pytest.mark.parametrize(("change", "refusal"), FALSE_WEIGHTS.values(), ids=FALSE_WEIGHTS)
async def test_a_false_patch_or_anchor_is_refused(
    change: Callable[[bytes, bytes], bytes | None], refusal: str, is_anchor: bool
) -> None:
    """Of these two functions of a version's honest bytes and an earlier version's, storage shows the result."""
    testbed = await follow_chain()
    await testbed.publish(anchor=is_anchor)
    if is_anchor:
        await testbed.restart_without_state()
    path = testbed.shard_path if is_anchor else testbed.patch_path
    honest, earlier = [await testbed.store.get(path(version), 1 << 30) for version in (4, 0 if is_anchor else 2)]
    await testbed.replace(path(4), change(honest, earlier))
    await testbed.assert_refuses_weights(refusal)
    await testbed.store.put(path(4), honest)
    await testbed.assert_follows()


# What the trainer signed, although it is false


async def test_arbitrary_weights_that_do_not_follow_from_the_signed_patch():
    testbed = await follow_chain()
    await testbed.publish(head=False)
    honest = testbed.chain.signed_manifests.pop().record
    await testbed.forge(patch=honest.patch, weights=samples.digest("other weights"))
    await testbed.assert_refuses_weights("not those that the trainer signed")


@pytest.mark.parametrize(
    ("more_tensors", "count", "refusal"),
    [({"extra": small_weights(1)["b"]}, 1, "the tensors differ from the manifest's table"), ({}, 2, "in two shards")],
    ids=["a tensor that the table does not list", "a tensor in two shards"],
)
async def test_extraneous_tensors_of_an_anchor(more_tensors: dict[str, Any], count: int, refusal: str) -> None:
    testbed = await follow_chain()
    shard = safetensors.write(small_weights(1) | more_tensors)
    ref = ObjectRef(digest=content_digest(shard), size=len(shard))
    await testbed.store.put(paths.anchor(TRAINER.public, ref.digest), shard)
    testbed.chain.anchors.append(4)
    await testbed.forge(anchor=(ref,) * count, patch=None)
    await testbed.assert_refuses_weights(refusal)


# The run itself


async def test_arbitrary_another_genesis_than_the_run_names():
    testbed = AttackedFollower()
    testbed.genesis = small_weights(9)
    await testbed.publish()
    await testbed.restart()
    await testbed.assert_refuses("not the run's genesis weights")


async def test_arbitrary_a_run_manifest_with_another_id_or_too_few_signatures():
    testbed = AttackedFollower()
    other = testbed.run.model_copy(update={"group_size": 2})
    with pytest.raises(ProtocolError, match="is run"):
        open_run(sign(other, *ROOTS[:2]), testbed.run_id)
    with pytest.raises(ProtocolError, match="not signed by 2 of its own roots"):
        open_run(sign(testbed.run, ROOTS[0]))


# Listings


async def test_endless_announcements_are_passed_over():
    testbed = await follow_chain()
    await testbed.node.announce("miner", 60.0)
    await testbed.store.put(paths.participant(STRANGER.public), bytes(1 << 20))
    assert await testbed.participants() == [MINER.public]
    (line,) = testbed.log.named("announcement-refused")
    assert STRANGER.public.hex() in line["path"]


class Endless(MemoryStore):
    """A store whose listing of announcements never ends."""

    entries = 0

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        while True:
            self.entries += 1
            yield ObjectInfo(paths.participant(self.entries.to_bytes(32, "big")), 100)


async def test_endless_a_listing_of_participants():
    testbed = AttackedFollower()
    testbed.store = Endless()
    testbed.node = testbed.new_node()
    assert len(await list_announced_keys(testbed.node)) <= 2 * limits.MAX_LISTED_PARTICIPANTS
    assert testbed.store.entries == 2 * limits.MAX_LISTED_PARTICIPANTS  # from the beginning, and from elsewhere
