"""The upload process: snapshots in, a chain in storage out (docs/spec/chain.md).

For every snapshot, in order of version: encode and upload the patch, sign the manifest and record it, upload the
manifest, write the head, record that the version is published. Each step can be repeated with the same bytes, so a
process that is killed at any instruction goes on where it was. Anchors are uploaded in tasks of their own, and the head
names them once they are complete.
"""

from contextlib import suppress
from dataclasses import dataclass

import trio

from protocol import paths
from protocol.chain.manifest import Manifest, PatchRef, tensor_table
from protocol.difficulty import DifficultyTable
from protocol.errors import ChainError, PatchError
from protocol.identity.signing import Signed, sign
from protocol.limits import MAX_SHARD_BYTES
from protocol.objects import ObjectRef
from protocol.patch import split_parts
from roles.node.identity import Node
from roles.ports import NotFoundError, StateError, StoreError
from roles.trainer.publish.fencing import Fence
from roles.trainer.publish.head_writer import HeadWriter
from roles.trainer.publish.history import History
from roles.trainer.publish.key_migration import migrate
from roles.trainer.publish.retention import DeletionSchedule
from roles.trainer.publish.version_build import VersionBuild, VersionWeights, reference
from roles.trainer.spool import (
    DIFFICULTY,
    PUBLISHED_WEIGHTS,
    SnapshotName,
    count_shards,
    list_snapshots,
    weights_folder,
)
from roles.trainer.tensor_shards import ShardReader, shard_path


@dataclass(frozen=True)
class PublisherSettings:
    """What a trainer's operator sets."""

    anchor_interval: int = 50  # most versions between anchors
    keep_patches: int = 100  # in storage (retention.py)
    keep_anchors: int = 10
    patch_attempts: int = 3  # to upload a patch before the version gets an anchor instead
    poll_seconds: float = 0.05  # between two looks for a snapshot
    takeover_seconds: float = 1.0  # how long a start waits for the head of another trainer under its key
    # by which this start's heads expire earlier: random, so that two trainers that start at the same moment do not
    # write equal heads
    expiry_offset_ms: int = 0
    profile: str = "compact"  # of the patches: "compact" or "fast"
    threads: int = 1  # tensors that are encoded at the same time
    part_bytes: int = 4 << 20


class Publisher:
    """Publishes the snapshots of one trainer."""

    def __init__(self, node: Node, history: History, settings: PublisherSettings) -> None:
        self._node = node
        self._history = history
        self._settings = settings
        self.fence = Fence(node, history)
        self.started = trio.Event()
        self._published_weights: VersionWeights | None = None  # of the newest published version
        self._uploading: set[int] = set()  # versions whose anchor is being uploaded
        self._heads = HeadWriter(
            node,
            history,
            self.fence,
            keep_patches=settings.keep_patches,
            keep_anchors=settings.keep_anchors,
            expiry_offset_ms=settings.expiry_offset_ms,
        )
        self._deletions = DeletionSchedule(node.run.head_ttl)

    async def run(self) -> None:
        await self._start()
        self.started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.keep_announced, "trainer", 600.0)
            nursery.start_soon(self._heads.keep_fresh)
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
        # An epoch of one's own comes before everything that others can see: whoever publishes under the same key
        # notices it, and stops or is noticed (fencing.py).
        node, history = self._node, self._history
        await history.clean_up()
        await self._heads.begin()
        version = history.published_version
        # The next patch leads from these weights. If one bit of them were wrong, no follower could apply it, so they
        # are compared with the signed manifest before anything is built on them.
        if version >= 0:
            build = VersionBuild(version)
            shards = await count_shards(node.state, f"{PUBLISHED_WEIGHTS}{version:010d}")
            await self._read(build, self._reader(version, shards))
            weights: VersionWeights = await node.run_sync(build.weights)
            if weights.digest != history.manifests[version].record.weights:
                raise StateError(
                    f"{weights_folder(version)} of this node's state",
                    f"not the weights that were published as version {version}",
                )
            self._published_weights = weights
        # After a rotation of the key the chain moves to the new key's space. The writer is recorded last, so a crash in
        # between makes the next start move it again.
        if history.writer not in (None, node.key.public):
            assert history.writer is not None
            await migrate(node, history, history.writer, self._heads.head(version))
        await history.set_writer(node.key.public)
        # Now the first head. What storage has lost must be retired before, since a head names only what is there.
        await self._retire_lost_anchors()
        if version >= 0:
            await self._heads.write(version)
            await trio.sleep(self._settings.takeover_seconds)
            await self._heads.write(version)

    async def _retire_lost_anchors(self) -> None:
        """Retire the anchors that storage has lost, if the chain can be followed from another one."""
        history = self._history
        for version in sorted(version for version in history.anchors if version <= history.published_version):
            missing_path = await self._missing_shard(history.manifests[version].record)
            if missing_path is None:
                continue
            # Another anchor helps only if the patches that follow it are not retired. Without one this anchor stays in
            # the record: storage may show it again, and a chain without an anchor cannot be followed by a new node.
            others = [other for other in history.anchors if other != version and other >= history.first_patch - 1]
            self._node.telemetry.event("anchor-lost", version=version, path=missing_path, retired=bool(others))
            if others:
                await history.retire_anchors({version})

    async def _missing_shard(self, manifest: Manifest) -> str | None:
        """Return the path of a shard of a version's anchor that storage says is not there; None if it shows all."""
        for ref in manifest.anchor:
            path = paths.anchor(self._node.key.public, ref.digest)
            # The last byte tells whether the shard is there in its full length, and costs no download.
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
        # Objects first, then the signature that names them. If the manifest is signed already, a crash came after that:
        # its patch is in storage, and only the digest of the weights is computed again.
        signed = history.manifests.get(name.version)
        if signed is None:
            weights, patch, anchor = await self._build(name, reader)
            signed = await self._sign_manifest(name, weights, patch, anchor)
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
        # From here on every step may be repeated with the same bytes, and followers see them in an order in which
        # nothing is named before it is there: anchor (if there is no other way to the version), manifest, head.
        if manifest.patch is None and manifest.version not in history.anchors:
            await self._upload_shards(manifest)
        await node.publish(paths.manifest(node.key.public, manifest.version, signed.digest), signed.data)
        await self._heads.write(manifest.version)
        # A crash before the mark: all of this is done again, and the version is logged twice, never not at all. A crash
        # after it: the snapshot is found to be published, and only deleted.
        self._log_version(manifest)
        await history.mark_published(manifest.version, weights.shards)
        await node.state.delete(name.path)
        self._published_weights = weights
        # An anchor beside a patch is for nodes that join later, so it delays no version.
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

    async def _build(
        self, name: SnapshotName, reader: ShardReader
    ) -> tuple[VersionWeights, PatchRef | None, tuple[ObjectRef, ...]]:
        """Return a version's weights, its patch, which is uploaded then, and the shards of its anchor. If the patch
        fails, here or in the store, the version has an anchor instead.
        """
        previous = self._published_weights
        if previous is None:
            build = VersionBuild(name.version)
            await self._read(build, reader)
            weights: VersionWeights = await self._node.run_sync(build.weights)
            return weights, None, await self._shard_refs(weights)
        weights, patch = await self._build_patch(name.version, previous, reader)
        if patch is None:
            return weights, None, await self._shard_refs(weights)
        # The parts are uploaded before the manifest is signed: if storage refuses one, the version gets an anchor
        # instead, and a manifest that is signed can no longer say so.
        parts: list[ObjectRef] = []
        for part in await self._node.run_sync(split_parts, patch[0], self._settings.part_bytes):
            parts.append(await self._node.run_sync(reference, part))
            if not await self._upload_part(part, parts[-1]):
                return weights, None, await self._shard_refs(weights)
        patch_ref = PatchRef(parts=tuple(parts), changed=patch[1])
        has_anchor = self._needs_anchor(weights, patch_ref)
        return weights, patch_ref, await self._shard_refs(weights) if has_anchor else ()

    def _needs_anchor(self, weights: VersionWeights, patch: PatchRef) -> bool:
        """Return whether a node that joins would fetch less with an anchor of this version than with the patches that
        follow the last one, or the interval is over.
        """
        nbytes, retired = patch.size, self._history.retired_anchors  # such as those that storage lost
        for version in range(weights.version - 1, -1, -1):
            earlier = self._history.manifests.get(version)
            if earlier is None or earlier.record.patch is None or (earlier.record.anchor and version not in retired):
                break
            nbytes += earlier.record.patch.size
        # One at a time: on a slow link, anchors must not delay each other and the patches.
        is_cheaper = not self._uploading and nbytes >= sum(tensor.nbytes for tensor in weights.outline.values())
        return is_cheaper or weights.version % self._settings.anchor_interval == 0

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
                weight_bytes=sum(tensor.nbytes for tensor in weights.outline.values()),
                patch_bytes=len(patch[0]),
                encode_seconds=encode_seconds,
                apply_seconds=apply_seconds,
            )
        return weights, patch

    async def _shard_refs(self, weights: VersionWeights) -> tuple[ObjectRef, ...]:
        """Return the references to the files of a version's weights, which are the shards of its anchor."""
        refs = []
        for number in range(weights.shards):
            path = shard_path(weights_folder(weights.version), number)
            refs.append(await self._node.run_sync(reference, await self._node.state.get(path, MAX_SHARD_BYTES)))
        return tuple(refs)

    async def _upload_part(self, part: bytes, ref: ObjectRef) -> bool:
        """Upload a part of a patch; return whether one of the attempts succeeded."""
        path = paths.patch(self._node.key.public, ref.digest)
        for _ in range(self._settings.patch_attempts):
            try:
                await self._node.store.put(path, part)
            except StoreError as error:
                self._node.telemetry.event("put-failed", path=path, error=str(error))
            else:
                if await self._node.is_readable(path, part):
                    return True
        return False

    async def _sign_manifest(
        self, name: SnapshotName, weights: VersionWeights, patch: PatchRef | None, anchor: tuple[ObjectRef, ...]
    ) -> Signed[Manifest]:
        """Sign a version's manifest, and record it before anything shows the version."""
        node, history = self._node, self._history
        previous = history.manifests.get(name.version - 1)
        if previous is not None and previous.record.beacon_round > 1:  # round 1 is also recorded before it is out
            node.time.record_round(previous.record.beacon_round)  # this round is over, whatever the clock says
        difficulty = await self._difficulty(previous)  # read before the round: the table's window must be over
        # Proven by the beacon and not read from the clock, because a signature cannot be taken back.
        beacon_round = await node.time.wait_for_newest_round()
        first_window, schedule = 0, node.run.schedule
        if previous is not None:  # everybody has `lead` windows to fetch this version
            first_window = max(previous.record.first_window, schedule.window_at(beacon_round) + schedule.lead)
        manifest = Manifest(
            run=node.run_id,
            version=name.version,
            previous=previous.digest if previous else b"",
            weights=weights.digest,
            tensors=tensor_table(weights.outline),
            patch=patch,
            anchor=anchor,
            optimizer_step=name.optimizer_step,
            beacon_round=max(1, beacon_round),
            first_window=first_window,
            epoch=history.epoch,
            difficulty=difficulty,
        )
        return await history.record_manifest(sign(manifest, node.key))

    async def _difficulty(self, previous: Signed[Manifest] | None) -> DifficultyTable | None:
        """Return the newest difficulty table; None in a run without tables."""
        rule = self._node.run.difficulty
        if rule is None:
            return None
        table = before = DifficultyTable.of(rule) if previous is None else previous.record.difficulty
        with suppress(NotFoundError):
            if previous is not None:
                table = DifficultyTable.from_bytes(await self._node.state.get(DIFFICULTY, DifficultyTable.max_bytes))
        # A collector that has started again may have written that of an older window.
        return before if table is None or (before is not None and table.window < before.window) else table

    async def _upload_shards(self, manifest: Manifest) -> None:
        """Upload the files of a version's weights as the shards of its anchor, one after the other."""
        node = self._node
        for number, ref in enumerate(manifest.anchor):
            shard = await node.state.get(shard_path(weights_folder(manifest.version), number), ref.size)
            await node.publish(paths.anchor(node.key.public, ref.digest), shard)
        await self._history.complete_anchor(manifest)

    async def _upload_anchor(self, manifest: Manifest) -> None:
        """Upload an anchor while later versions are published, then write a head that names it."""
        # `_uploading` keeps the files until the upload has ended, also if the version leaves the chain meanwhile.
        self._uploading.add(manifest.version)
        await self._upload_shards(manifest)
        self._uploading.remove(manifest.version)
        await self._heads.write(self._history.published_version)
        await self._history.delete_needless_weights(self._uploading)

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
        """Retire what the head does not name any more, and delete what no valid head can name, now or later. Storage
        that fails is tried again the next time.
        """
        # Listing storage costs requests, so it is done a few times in the life of a patch.
        node, history = self._node, self._history
        if history.published_version % max(1, self._settings.keep_patches // 10):
            return
        await history.retire(self._heads.head(history.published_version))
        available, unnamed = history.available_paths(node.key.public), set[str]()
        try:
            for kind in ("manifests", "patches", "anchors"):
                items = node.store.list(paths.kind_prefix(node.key.public, kind))
                unnamed |= {item.path async for item in items if item.path not in available}
            for path in self._deletions.paths_to_delete(unnamed, trio.current_time()):
                await node.store.delete(path)
        except StoreError as error:
            node.telemetry.event("deletion-failed", error=str(error))
