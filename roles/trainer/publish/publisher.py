"""The upload process: snapshots in, a chain in storage out (docs/spec/chain.md).

For every snapshot, in order of version: encode and upload the patch, sign the manifest and record it, upload the
manifest, write the head, record that the version is published. Each step can be repeated with the same bytes, so a
process that is killed at any instruction goes on where it was. Anchors are uploaded in tasks of their own, and the head
names them once they are complete.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import content_digest
from protocol.errors import ChainError, PatchError
from protocol.identity.signing import Signed, sign
from protocol.limits import MAX_SHARD_BYTES
from protocol.objects import ObjectRef
from protocol.patch import split_parts
from roles.node.identity import Node
from roles.ports import NotFoundError, StateError, StoreError
from roles.trainer.publish.fencing import Fence
from roles.trainer.publish.history import HeadStamp, History, make_head
from roles.trainer.publish.key_migration import migrate
from roles.trainer.publish.retention import DeletionSchedule
from roles.trainer.publish.version_build import (
    PublicationMoment,
    VersionBuild,
    VersionObjects,
    VersionWeights,
    make_manifest,
    reference,
)
from roles.trainer.spool import SnapshotName, count_shards, list_snapshots, weights_folder
from roles.trainer.tensor_shards import ShardReader, shard_path


@dataclass(frozen=True)
class PublisherSettings:
    """What a trainer's operator sets.

    Attributes:
        anchor_interval: versions between anchors.
        keep_patches, keep_anchors: how many of them storage keeps (retention.py).
        patch_attempts: attempts to upload a patch before the version gets an anchor instead.
        poll_seconds: how often to look for a snapshot.
        takeover_seconds: how long a start waits for the head of another trainer under its key.
        expiry_offset_ms: milliseconds by which this start's heads expire earlier. It is random at each start, so that
            two trainers that start at the same moment do not write equal heads.
        profile: of the patches: "compact" or "fast".
        threads: how many tensors to encode at the same time.
    """

    anchor_interval: int = 50
    keep_patches: int = 100
    keep_anchors: int = 10
    patch_attempts: int = 3
    poll_seconds: float = 0.05
    takeover_seconds: float = 1.0
    expiry_offset_ms: int = 0
    profile: str = "compact"
    threads: int = 1
    part_bytes: int = 4 << 20


_CLOCK_SECONDS: Final = 1.0  # between two readings of the clock, which somebody may set


class Publisher:
    """Publishes the snapshots of one trainer.

    Attributes:
        fence: says when this publisher must stop.
        started: set once this publisher has begun its epoch and shows its head.
    """

    def __init__(self, node: Node, history: History, settings: PublisherSettings) -> None:
        self._node = node
        self._history = history
        self._settings = settings
        self.fence = Fence(node, history)
        self.started = trio.Event()
        self._published_weights: VersionWeights | None = None  # of the newest published version
        self._uploading: set[int] = set()  # versions whose anchor is being uploaded
        self._head_lock = trio.Lock()
        self._head_version = history.published_version
        self._head_expiry = 0.0  # seconds since the Unix epoch, without the offset
        self._deletions = DeletionSchedule(node.run.head_ttl)

    async def run(self) -> None:
        """Publish for ever."""
        await self._start()
        self.started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.keep_announced, "trainer", 600.0)
            nursery.start_soon(self._renew_head)
            for manifest in self._history.incomplete_anchors():
                nursery.start_soon(self._upload_anchor, manifest)
            while True:
                names = await list_snapshots(self._node.state)
                if not names:
                    await trio.sleep(self._settings.poll_seconds)
                    continue
                await self._publish(names[0], nursery)

    async def _start(self) -> None:
        """Check what is published against this node's state, begin a new epoch, and write a head of that epoch.

        The second head follows after some seconds, in which another trainer under this key can write its own.
        """
        node, history = self._node, self._history
        await history.clean_up()
        self._head_version = max(self._head_version, await self.fence.begin())  # a head never shows less than the last
        version = history.published_version
        if version >= 0:
            build = VersionBuild(version)
            await self._read(build, self._reader(version, await history.published_shards()))
            weights: VersionWeights = await node.run_sync(build.weights)
            if weights.digest != history.manifests[version].record.weights:
                raise StateError(
                    f"{weights_folder(version)} of this node's state",
                    f"not the weights that were published as version {version}",
                )
            self._published_weights = weights
        if history.writer not in (None, node.key.public):
            assert history.writer is not None
            await migrate(node, history, history.writer, self._head(version))
        await history.set_writer(node.key.public)
        await self._retire_lost_anchors()
        if version >= 0:
            await self._write_head(version)
            await trio.sleep(self._settings.takeover_seconds)
            await self._write_head(version)

    async def _retire_lost_anchors(self) -> None:
        """Retire the anchors that storage has lost, if the chain can be followed from another one."""
        history = self._history
        for version in sorted(version for version in history.anchors if version <= history.published_version):
            missing_path = await self._missing_shard(history.manifests[version].record)
            if missing_path is None:
                continue
            others = [other for other in history.anchors if other != version and other >= history.first_patch - 1]
            self._node.telemetry.event("anchor-lost", version=version, path=missing_path, retired=bool(others))
            if others:
                await history.retire_anchors({version})

    async def _missing_shard(self, manifest: Manifest) -> str | None:
        """Return the path of a shard of a version's anchor that storage says is not there; None if it shows all."""
        for ref in manifest.anchor:
            path = paths.anchor(self._node.key.public, ref.digest)
            try:
                await self._node.store.get(path, 1, offset=ref.size - 1, size=1)
            except NotFoundError:
                return path
            except StoreError:
                continue  # without an answer the shard counts as there
        return None

    async def _publish(self, name: SnapshotName, nursery: trio.Nursery) -> None:
        node, history = self._node, self._history
        if name.version <= history.published_version:
            await node.state.delete(name.path)  # a crash came after it was published and before it was deleted here
            return
        if name.version != history.published_version + 1:
            raise ChainError(
                f"the outbox begins with version {name.version}, {history.published_version} is published", "outbox"
            )
        reader = self._reader(name.version, await count_shards(node.state, name.path))
        signed = history.manifests.get(name.version)
        if signed is None:
            objects = await self._build(name, reader)
            signed, weights = await self._sign_manifest(name, objects), objects.weights
        else:
            build = VersionBuild(name.version)
            await self._read(build, reader)
            weights = await node.run_sync(build.weights)
        manifest = signed.record
        if manifest.weights != weights.digest:
            raise StateError(
                f"{weights_folder(name.version)} of this node's state",
                f"not the weights of the manifest that was signed for version {name.version}",
            )
        if manifest.patch is None and manifest.version not in history.anchors:
            await self._upload_shards(manifest)
        await node.publish(paths.manifest(node.key.public, manifest.version, signed.digest), signed.data)
        await self._write_head(manifest.version)
        self._log_version(manifest)  # before the mark: after a crash between them it is logged twice, never not at all
        await history.mark_published(manifest.version, weights.shards)
        await node.state.delete(name.path)
        self._published_weights = weights
        if manifest.anchor and manifest.version not in history.anchors:
            nursery.start_soon(self._upload_anchor, manifest)
        await history.delete_needless_weights(self._uploading)
        await self._delete_unnamed_objects()

    def _reader(self, version: int, shards: int) -> ShardReader:
        return ShardReader(self._node.state, weights_folder(version), shards, self._node.run_sync)

    async def _read(self, build: VersionBuild, reader: ShardReader) -> None:
        """Read the weights of a version into its build."""
        while (new := await reader.next_shard()) is not None:
            await self._node.run_sync(build.add, new)

    async def _build(self, name: SnapshotName, reader: ShardReader) -> VersionObjects:
        """Return a version's objects, with the patch uploaded. If the patch fails, here or in the store, the version
        has an anchor instead.
        """
        previous = self._published_weights
        if previous is None:
            build = VersionBuild(name.version)
            await self._read(build, reader)
            return await self._anchored(await self._node.run_sync(build.weights))
        weights, patch = await self._build_patch(name.version, previous, reader)
        if patch is None:
            return await self._anchored(weights)
        parts: tuple[bytes, ...] = await self._node.run_sync(split_parts, patch[0], self._settings.part_bytes)
        for part in parts:
            if not await self._upload_part(part):
                return await self._anchored(weights)
        has_anchor = name.version % self._settings.anchor_interval == 0
        return VersionObjects(weights, parts, patch[1], await self._shard_refs(weights) if has_anchor else ())

    async def _build_patch(
        self, version: int, previous: VersionWeights, reader: ShardReader
    ) -> tuple[VersionWeights, tuple[bytes, int] | None]:
        """Return the weights of a version, and the patch from the previous one with how many elements it changes; None
        for the patch if the codec is at fault. Encoding and checking are measured.
        """
        run_sync, settings = self._node.run_sync, self._settings
        build = VersionBuild(version, previous, settings.profile, settings.threads)
        old_reader = self._reader(previous.version, previous.shards)
        encode_seconds = apply_seconds = 0.0
        patch: tuple[bytes, int] | None = None
        try:
            while (new := await reader.next_shard()) is not None:
                old = await old_reader.take(new.keys())
                began = trio.current_time()
                await run_sync(build.add, new)
                await run_sync(build.encode, new, old)
                encode_seconds += trio.current_time() - began
                began = trio.current_time()
                await run_sync(build.check, new, old)
                apply_seconds += trio.current_time() - began
                for tensors in (new, old):
                    await run_sync(tensors.clear)  # to give memory back takes long on an event loop
            patch = await run_sync(build.patch)
        except PatchError as error:
            self._node.telemetry.event("patch-refused", version=version, error=str(error))
            await self._read(build, reader)
        weights: VersionWeights = await run_sync(build.weights)
        if patch is not None:
            self._node.telemetry.event(
                "patch",
                version=version,
                profile=settings.profile,
                weight_bytes=weights.nbytes,
                patch_bytes=len(patch[0]),
                encode_seconds=encode_seconds,
                apply_seconds=apply_seconds,
            )
        return weights, patch

    async def _anchored(self, weights: VersionWeights) -> VersionObjects:
        return VersionObjects(weights, (), 0, await self._shard_refs(weights))

    async def _shard_refs(self, weights: VersionWeights) -> tuple[ObjectRef, ...]:
        """Return the references to the files of a version's weights, which are the shards of its anchor."""
        refs = []
        for number in range(weights.shards):
            path = shard_path(weights_folder(weights.version), number)
            refs.append(await self._node.run_sync(reference, await self._node.state.get(path, MAX_SHARD_BYTES)))
        return tuple(refs)

    async def _upload_part(self, part: bytes) -> bool:
        """Upload a part of a patch; return whether one of the attempts succeeded."""
        path = paths.patch(self._node.key.public, await self._node.run_sync(content_digest, part))
        for _ in range(self._settings.patch_attempts):
            try:
                await self._node.store.put(path, part)
            except StoreError as error:
                self._node.telemetry.event("put-failed", path=path, error=str(error))
            else:
                if await self._node.is_readable(path, part):
                    return True
        return False

    async def _sign_manifest(self, name: SnapshotName, objects: VersionObjects) -> Signed[Manifest]:
        """Sign a version's manifest, and record it before anything shows the version."""
        node, history = self._node, self._history
        previous = history.manifests.get(name.version - 1)
        if previous is not None and previous.record.beacon_round > 1:  # round 1 is also recorded before it is out
            node.time.record_round(previous.record.beacon_round)  # this round is over, whatever the clock says
        beacon_round = (
            await node.time.wait_for_newest_round()
        )  # proven by the beacon, because a signature cannot be taken back
        moment = PublicationMoment(
            run_id=node.run_id,
            previous=previous.digest if previous else b"",
            optimizer_step=name.optimizer_step,
            beacon_round=max(1, beacon_round),
            first_window=self._first_window(previous.record.first_window, beacon_round) if previous else 0,
            epoch=history.epoch,
        )
        manifest = await node.run_sync(make_manifest, objects, moment)
        return await history.record_manifest(sign(manifest, node.key))

    def _first_window(self, previous_first_window: int, beacon_round: int) -> int:
        """Return the first window that a version of this round may serve: everybody has `lead` windows to fetch it."""
        schedule = self._node.run.schedule
        return max(previous_first_window, schedule.window_at(beacon_round) + schedule.lead)

    async def _upload_shards(self, manifest: Manifest) -> None:
        """Upload the files of a version's weights as the shards of its anchor, one after the other."""
        node = self._node
        for number, ref in enumerate(manifest.anchor):
            shard = await node.state.get(shard_path(weights_folder(manifest.version), number), ref.size)
            await node.publish(paths.anchor(node.key.public, ref.digest), shard)
        await self._history.complete_anchor(manifest)

    async def _upload_anchor(self, manifest: Manifest) -> None:
        """Upload an anchor while later versions are published, then write a head that names it."""
        self._uploading.add(manifest.version)
        await self._upload_shards(manifest)
        self._uploading.remove(manifest.version)
        await self._write_head(self._history.published_version)
        await self._history.delete_needless_weights(self._uploading)

    def _head(self, newest: int, revision: int = 0, expires_ms: int = 0) -> Head:
        """Return the head that shows everything up to version `newest`."""
        settings = self._settings
        stamp = HeadStamp(self._node.run_id, revision, expires_ms)
        return make_head(self._history, newest, settings.keep_patches, settings.keep_anchors, stamp)

    async def _write_head(self, newest: int) -> None:
        """Write a head that shows everything up to version `newest`."""
        node = self._node
        await node.time.wait_for_newest_round()  # before the lock, because it waits as long as the clock is wrong
        async with self._head_lock:
            revision = node.revisions.number  # if a rewind arrives after the check, followers must refuse this head
            with suppress(StoreError):  # a store that does not answer shows no other trainer; the put is retried anyway
                await self.fence.check()
            # an anchor's upload may end after a version's head was written and before the version is marked published
            self._head_version = max(newest, self._head_version)
            self._head_expiry = await node.time.proven_time() + node.run.head_ttl
            expires_ms = int(self._head_expiry * 1000) - self._settings.expiry_offset_ms
            head = self._head(self._head_version, revision, expires_ms)
            self.fence.add_own_head(content_digest(head.to_bytes()))
            await node.publish(paths.head(node.key.public), sign(head, node.key))

    async def _renew_head(self) -> None:
        """Write the head again before it expires, and after the clock was set, for as long as this process lives."""
        node = self._node
        while True:
            await trio.sleep(_CLOCK_SECONDS)
            await self.fence.obey_rewind()
            remaining = self._head_expiry - node.time.now()
            if self._history.published_version >= 0 and not node.run.head_ttl * 2 / 3 < remaining <= node.run.head_ttl:
                await self._write_head(self._history.published_version)

    def _log_version(self, manifest: Manifest) -> None:
        self._node.telemetry.event(
            "published",
            version=manifest.version,
            optimizer_step=manifest.optimizer_step,
            first_window=manifest.first_window,
            patch_bytes=manifest.patch.size if manifest.patch else 0,
            changed=manifest.patch.changed if manifest.patch else 0,
            elements=manifest.elements,
        )

    async def _delete_unnamed_objects(self) -> None:
        """Retire what the head does not name any more, and delete what no valid head can name."""
        history, settings, key = self._history, self._settings, self._node.key.public
        if history.published_version % max(1, settings.keep_patches // 10):
            return
        await history.retire(self._head(history.published_version))
        available: set[str] = set()
        for version, signed in history.manifests.items():
            available.add(paths.manifest(key, version, signed.digest))
            if signed.record.patch is not None and version >= history.first_patch:
                available |= {paths.patch(key, ref.digest) for ref in signed.record.patch.parts}
            if version not in history.retired_anchors:
                available |= {paths.anchor(key, ref.digest) for ref in signed.record.anchor}
        unnamed: set[str] = set()
        try:
            for kind in ("manifests", "patches", "anchors"):
                items = self._node.store.list(paths.kind_prefix(key, kind))
                unnamed |= {item.path async for item in items if item.path not in available}
            for path in self._deletions.paths_to_delete(unnamed, trio.current_time()):
                await self._node.store.delete(path)
        except StoreError as error:
            self._node.telemetry.event("deletion-failed", error=str(error))
