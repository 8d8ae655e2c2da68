"""The follower: it takes what it can verify, part by part, catches up from far behind, and else keeps its last good
version. What storage may show it otherwise is in tests/attacks.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from grailnode.store.decorators.caching import CachedStore, DiskCache
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.chain.manifest import Manifest, PatchRef
from protocol.digest import Weights, digest_weights
from protocol.encoding import content_digest
from protocol.errors import ChainError, GapError, MalformedError, ProtocolError
from protocol.identity.signing import open_signed, sign
from protocol.objects import ObjectRef
from protocol.quantization import SCALE, Precision, quantize
from roles.policy.follower import Follower
from roles.ports import StoreError
from tests.support.attacked_nodes.follower import HOUR_MS, AttackedFollower, follow_chain
from tests.support.builders.chains import TRAINER, Chain, equal, make_node, small_run
from tests.support.faults.decorated_store import DecoratedStore, Link, UnreachableStore
from tests.support.simulation.network import BEGIN, Log, inline


async def test_a_false_patch_is_replaced_by_an_anchor():
    testbed = await follow_chain(1)
    await testbed.publish()
    await testbed.publish(1, anchor=True)
    path = testbed.patch_path(2)
    good = await testbed.store.get(path, 1 << 20)
    await testbed.store.put(path, good[:-1] + bytes([good[-1] ^ 1]))
    await testbed.follower.refresh()
    with pytest.raises(MalformedError, match="not the bytes of this digest"):
        await testbed.follower.prefetch()
    assert equal(await testbed.follow(3), testbed.chain.weights[3])  # by way of the anchor of version 3
    assert testbed.log.named("fast-path-failed")


async def test_trust_is_on_disk_before_it_is_used():
    testbed = AttackedFollower()
    await testbed.publish(3)
    full_disk: Any = UnreachableStore(testbed.state, "", operations=("put",))
    testbed.state = full_disk
    follower = await testbed.new_follower()
    with pytest.raises(StoreError):
        await follower.refresh()
    assert follower.chain.trust is None
    with pytest.raises(GapError):
        await follower.rebuild(2)


class WatchedBytes(bytes):
    """An object of storage that tells when it is freed."""

    def __del__(self) -> None:
        FREED.append("object")


class WatchedObjects(DecoratedStore):
    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        return WatchedBytes(data) if "/anchors/" in path or "/patches/" in path else data


def watched_tensors(weights: Weights) -> dict[str, Tensor]:
    tensors = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in tensors.values():
        weakref.finalize(tensor, FREED.append, "tensor")
    return tensors


FREED: list[str] = []


async def test_objects_and_the_versions_between_are_not_freed_on_the_event_loop():
    """From the anchor of version 0, and over three patches."""
    testbed = AttackedFollower()
    await testbed.publish(4)
    freed_by_workers = 0

    async def run_sync(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal freed_by_workers
        before = len(FREED)
        result = function(*arguments)
        freed_by_workers += len(FREED) - before
        return result

    node = replace(testbed.node, store=WatchedObjects(testbed.store), run_sync=run_sync)
    follower = await Follower(node, new_tensors=watched_tensors).open()
    await follower.refresh()
    FREED.clear()
    for version in (0, 3):
        await follower.rebuild(version)
    assert Counter(FREED) == {"object": 1 + 3, "tensor": 3 * len(testbed.genesis)}
    assert freed_by_workers == len(FREED)


# Patches in parts: each is decoded when it has arrived and has its digest, and none changes what the node has


async def following_testbed() -> AttackedFollower:
    """Return a testbed whose patches have several parts, and whose follower has version 0."""
    testbed = await follow_chain(0)
    testbed.chain.part_bytes = 1
    return testbed


def assert_still_first(testbed: AttackedFollower) -> None:
    """Assert that the follower still has version 0."""
    assert testbed.follower.newest is not None
    assert equal(testbed.follower.newest.weights, testbed.chain.weights[0])


def part_paths(testbed: AttackedFollower, version: int) -> list[str]:
    ref = testbed.chain.signed_manifests[version].record.patch
    assert ref is not None
    return [paths.patch(TRAINER.public, part.digest) for part in ref.parts]


async def replace_parts(testbed: AttackedFollower, parts: list[bytes]) -> None:
    """Have the trainer sign other parts for version 1, and publish all but those that are empty."""
    refs = tuple(ObjectRef(digest=content_digest(part), size=len(part)) for part in parts)
    for part in parts:
        await testbed.store.put(paths.patch(TRAINER.public, content_digest(part)), part)
    record = testbed.chain.signed_manifests[1].record.model_copy(update={"patch": PatchRef(parts=refs, changed=1)})
    manifest = open_signed(sign(record, TRAINER), Manifest, [TRAINER.public])
    await testbed.store.put(paths.manifest(TRAINER.public, 1, manifest.digest), manifest.data)
    testbed.chain.signed_manifests[1] = manifest
    await testbed.chain.write_head()


async def test_a_follower_rebuilds_versions_from_parts_and_from_parts_that_it_prefetched():
    testbed = await following_testbed()
    await testbed.publish(3)
    assert all(len(part_paths(testbed, version)) > 1 for version in (1, 2, 3))
    assert equal(await testbed.follow(2), testbed.chain.weights[2])
    await testbed.follower.prefetch()
    for path in part_paths(testbed, 3):
        await testbed.store.delete(path)
    assert equal(await testbed.follow(3), testbed.chain.weights[3])


@pytest.mark.parametrize("change", ["swapped", "doubled", "one too few", "one too many", "bent and signed"])
async def test_signed_parts_that_are_no_patch_leave_the_version_before(change: str) -> None:
    testbed = await following_testbed()
    await testbed.publish()
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
    with pytest.raises(ProtocolError):
        await testbed.follow(1)
    assert_still_first(testbed)


async def test_a_part_is_decoded_while_the_next_one_has_not_arrived():
    """The first part is no patch, and the last one never arrives: the first is refused at once."""
    testbed = await following_testbed()
    await testbed.publish()
    parts = [await testbed.store.get(path, 1 << 20) for path in part_paths(testbed, 1)]
    await replace_parts(testbed, [b"GRP3" + bytes(len(parts[0]) - 4), *parts[1:]])
    withholding = UnreachableStore(testbed.store, part_paths(testbed, 1)[-1], seconds=inf)
    follower = await testbed.new_follower(withholding)
    await follower.refresh()
    with trio.fail_after(60), pytest.raises(ProtocolError):
        await follower.rebuild(1)


# Catching up: what is fetched, what stays after a cut, and the progress that is reported


def cached(link: Link, directory: Path) -> CachedStore:
    return CachedStore(link, DiskCache(directory / "cache", 1 << 24), piece_bytes=64, run_sync=inline)


async def test_a_hundred_versions_are_caught_up_with_progress() -> None:
    testbed = AttackedFollower()
    await testbed.publish(2)
    link = Link(testbed.store, seconds=1.0)
    testbed.follower = await testbed.new_follower(link)
    await testbed.follow()
    await testbed.publish(100)
    await testbed.assert_follows()
    assert sum("/patches/" in path for path in link.sent_bytes) == 101
    reports = testbed.log.named("catching-up")
    assert reports
    assert [event["step"] for event in reports] == sorted(event["step"] for event in reports)
    assert all(event["bytes_per_second"] > 0 and event["seconds_left"] >= 0 for event in reports)
    assert len(reports) <= 100  # one every other second, not one for every patch


async def test_a_download_is_continued_after_a_cut(tmp_path: Path) -> None:
    testbed = AttackedFollower()
    await testbed.publish(2)
    link = Link(testbed.store)
    testbed.follower = follower = await testbed.new_follower(cached(link, tmp_path))
    await testbed.follow()
    await testbed.publish(60)
    sizes = {info.path: info.size async for info in testbed.store.list(paths.kind_prefix(TRAINER.public, "patches"))}
    link.cut_after = sum(sizes.values()) * 2 // 3
    for _ in range(2):
        with pytest.raises(StoreError, match="reset"):
            await testbed.follow()
    assert follower.newest is not None
    assert 1 < follower.newest.version < 61  # the version that was verified before the cut
    assert equal(follower.newest.weights, testbed.chain.weights[follower.newest.version])
    link.cut_after = None
    await testbed.assert_follows()
    patch_bytes = {path: size for path, size in link.sent_bytes.items() if "/patches/" in path}
    assert patch_bytes == sizes  # every byte once


# Quantized versions: equal bit for bit by patches and anchors; bad scales and tables are never used


MATRIX = "model.layers.0.mlp.up_proj.weight"


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Return float32 weights after some small steps; a row's largest weight doubles with each."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(32, 16, generator=generator)
    for _ in range(step):
        matrix += 0.02 * torch.randn(matrix.shape, generator=generator)
        matrix[3, 2] = 2 * matrix[3].abs().max()
    return {MATRIX: matrix, "model.norm.weight": torch.ones(16) + step}


class Testbed:
    """A store with a quantized chain, and a node that follows it."""

    __test__ = False

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.store, self.log = MemoryStore(), Log("miner")
        _, run = small_run(digest_weights(self.version(0)))
        self.run = run.model_copy(update={"precision": precision})
        self.run_id = content_digest(self.run.to_bytes())
        self.chain = Chain(self.run_id, self.store, int(BEGIN * 1000) + HOUR_MS)

    def version(self, step: int) -> dict[str, torch.Tensor]:
        return quantize(weights_of(step), self.precision)

    async def follower(self) -> Follower:
        """Return a new follower that knows the newest head."""
        follower = await Follower(make_node(self.run_id, self.run, self.store, MemoryStore(), self.log)).open()
        await follower.refresh()
        return follower


@pytest.mark.parametrize("has_anchor", [False, True], ids=["by a patch", "by an anchor"])
async def test_a_bad_scale_is_refused_although_the_trainer_has_signed_it(has_anchor: bool) -> None:
    testbed = Testbed("fp8")
    await testbed.chain.publish(testbed.version(0))
    bad = testbed.version(1)
    bad[MATRIX + SCALE][5] = 1.5
    follower = await testbed.follower()
    good = await follower.rebuild(0)
    await testbed.chain.publish(bad, anchor=has_anchor)
    for one in (follower, await testbed.follower()):
        await one.refresh()
        with pytest.raises(ChainError, match=f"{MATRIX}{SCALE}: a scale that is no power of two"):
            await one.rebuild(1)
        assert (await one.rebuild(0)).digest == good.digest
    await testbed.chain.publish(testbed.version(2), anchor=True)
    await follower.refresh()
    assert (await follower.rebuild(2)).version == 2
