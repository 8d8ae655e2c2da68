"""A patch in parts: each is decoded when it has arrived and has its digest, and none changes what the node has."""

import pytest
import trio

from protocol import paths
from protocol.chain.manifest import Manifest, PatchRef
from protocol.digest import content_digest
from protocol.errors import ChainError, ProtocolError
from protocol.identity.signing import open_signed, sign
from protocol.objects import ObjectRef
from roles.policy.follower import Follower
from roles.ports import NotFoundError
from tests.roles.follower_testbed import FollowerTestbed
from tests.support.builders.chains import TRAINER, equal
from tests.support.simulation.virtual_clock import simulated


async def following_testbed() -> tuple[FollowerTestbed, Follower]:
    """Return a testbed whose patches have several parts, and a follower that has version 0."""
    testbed = FollowerTestbed()
    testbed.chain.part_bytes = 1
    await testbed.publish(0)
    follower = await testbed.follower()
    await follower.refresh()
    await follower.rebuild(0)
    return testbed, follower


def part_paths(testbed: FollowerTestbed, version: int) -> list[str]:
    ref = testbed.chain.signed_manifests[version].record.patch
    assert ref is not None
    return [paths.patch(TRAINER.public, part.digest) for part in ref.parts]


async def replace_parts(testbed: FollowerTestbed, parts: list[bytes]) -> None:
    """Have the trainer sign other parts for version 1, and publish all but those that are empty."""
    refs = tuple(ObjectRef(digest=content_digest(part), size=len(part)) for part in parts)
    for part in parts:
        await testbed.store.put(paths.patch(TRAINER.public, content_digest(part)), part)
    record = testbed.chain.signed_manifests[1].record.model_copy(update={"patch": PatchRef(parts=refs, changed=1)})
    manifest = open_signed(sign(record, TRAINER), Manifest, [TRAINER.public])
    await testbed.store.put(paths.manifest(TRAINER.public, 1, manifest.digest), manifest.data)
    testbed.chain.signed_manifests[1] = manifest
    await testbed.chain.write_head()


@simulated
async def test_a_follower_rebuilds_versions_from_parts_and_from_parts_that_it_prefetched():
    testbed, follower = await following_testbed()
    await testbed.publish(3)
    assert all(len(part_paths(testbed, version)) > 1 for version in (1, 2, 3))
    await follower.refresh()
    assert equal((await follower.rebuild(2)).weights, testbed.chain.weights[2])
    await follower.prefetch()
    for path in part_paths(testbed, 3):
        await testbed.store.delete(path)
    assert equal((await follower.rebuild(3)).weights, testbed.chain.weights[3])


@simulated
async def test_a_part_that_is_bent_or_gone_leaves_the_version_before():
    testbed, follower = await following_testbed()
    await testbed.publish(1)
    last = part_paths(testbed, 1)[-1]
    good = await testbed.store.get(last, 1 << 20)
    await follower.refresh()
    await testbed.store.put(last, bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(ChainError, match="not the bytes that the manifest names"):
        await follower.rebuild(1)
    await testbed.store.delete(last)
    with pytest.raises(NotFoundError):
        await follower.rebuild(1)
    assert follower.newest is not None
    assert equal(follower.newest.weights, testbed.chain.weights[0])
    await testbed.store.put(last, good)
    assert equal((await follower.rebuild(1)).weights, testbed.chain.weights[1])


@pytest.mark.parametrize("change", ["swapped", "doubled", "one too few", "one too many", "bent and signed"])
@simulated
async def test_signed_parts_that_are_no_patch_leave_the_version_before(change: str) -> None:
    testbed, follower = await following_testbed()
    await testbed.publish(1)
    parts = [await testbed.store.get(path, 1 << 20) for path in part_paths(testbed, 1)]
    false_part = parts[1][:-1] + bytes([parts[1][-1] ^ 1])
    changed = {
        "swapped": [parts[1], parts[0], *parts[2:]],
        "doubled": [*parts[:2], *parts[1:]],
        "one too few": parts[:-1],
        "one too many": [*parts, b"\0"],
        "bent and signed": [parts[0], false_part, *parts[2:]],
    }
    await replace_parts(testbed, changed[change])
    await follower.refresh()
    with pytest.raises(ProtocolError):
        await follower.rebuild(1)
    assert follower.newest is not None
    assert equal(follower.newest.weights, testbed.chain.weights[0])


@simulated
async def test_a_part_is_decoded_while_the_next_one_has_not_arrived():
    """The first part is no patch, and the last one never arrives: the first is refused at once."""
    testbed, _ = await following_testbed()
    await testbed.publish(1)
    parts = [await testbed.store.get(path, 1 << 20) for path in part_paths(testbed, 1)]
    await replace_parts(testbed, [b"GRP1" + bytes(len(parts[0]) - 4), *parts[1:]])
    last = part_paths(testbed, 1)[-1]

    class Withholding:
        """A store that never answers for the last part."""

        def __getattr__(self, name: str) -> object:
            return getattr(testbed.store, name)

        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            if path == last:
                await trio.sleep_forever()
            return await testbed.store.get(path, max_bytes, offset=offset, size=size)

    follower = await testbed.follower(Withholding())  # type: ignore[arg-type]
    await follower.refresh()
    with trio.fail_after(60), pytest.raises(ProtocolError):
        await follower.rebuild(1)
