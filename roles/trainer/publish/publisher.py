"""The upload process: snapshots in, a chain in storage out (docs/spec/chain.md).

For every snapshot, in order of version: encode and upload the patch, sign the manifest and record it, upload the
manifest, write the head, record that the version is published. Each step can be repeated with the same bytes, so a
process that is killed at any instruction goes on where it was. Anchors are uploaded in tasks of their own, and the head
names them once they are complete.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Final, TypeVar

import trio

from protocol import paths
from protocol.chain.manifest import Manifest, PatchRef, tensor_table
from protocol.difficulty import DifficultyTable
from protocol.digest import weights_digest
from protocol.errors import ChainError, PatchError
from protocol.identity.signing import Signed, sign
from protocol.objects import ObjectRef
from protocol.patch import EncodedTensor, split_parts
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StateError, StoreError
from roles.trainer.publish.fencing import Fence
from roles.trainer.publish.head_writer import HeadWriter
from roles.trainer.publish.history import History
from roles.trainer.publish.host_files import Base, EncodedFiles, HostFiles, VersionWeights, build_patch, reference
from roles.trainer.publish.key_migration import migrate
from roles.trainer.publish.retention import DeletionSchedule
from roles.trainer.spool import (
    DIFFICULTY,
    OUTBOX,
    SnapshotName,
    count_shards,
    list_snapshots,
    published_path,
    read_note,
    weights_folder,
)
from roles.trainer.tensor_shards import WrittenWeights

_LOST_SECONDS: Final = 1.0  # before an anchor that storage does not show is uploaded again

Result = TypeVar("Result")


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
    """Publishes the snapshots of one trainer, which may have other hosts, in the order of their files."""

    def __init__(
        self, node: Node, history: History, settings: PublisherSettings, others: Sequence[HostFiles] = ()
    ) -> None:
        self._node = node
        self._own = HostFiles(node, node.key.public, settings.profile, settings.threads, settings.patch_attempts)
        self._others = others
        self._hosts = (self._own, *others)
        self._encoded: Sequence[EncodedFiles] = ()  # what each host has of the newest version
        self._history = history
        self._settings = settings
        self.fence = Fence(node, history)
        self.started = trio.Event()
        self._uploading: set[int] = set()  # versions whose anchor is being uploaded
        keep = settings.keep_patches, settings.keep_anchors
        self._heads = HeadWriter(node, history, self.fence, keep, settings.expiry_offset_ms)
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
        """Check what is published against this node's state, begin a new epoch, and write a head of that epoch: twice,
        so that another trainer under this key can write its own in between.
        """
        # An epoch of one's own comes before everything that others can see: whoever publishes under the same key
        # notices it, and stops or is noticed (fencing.py).
        node, history = self._node, self._history
        await history.clean_up()
        await self._heads.begin()
        version = history.published_version
        # The next patch leads from these weights. If one bit of them were wrong, no follower could apply it, so they
        # are compared with the signed manifest before anything is built on them; those of which other hosts have
        # files, when the next patch is built.
        if version >= 0:
            files = await count_shards(node.state, published_path(version))
            if not self._others or len(await self._own.numbers(version)) == files:
                tensors = await self._encode(version, files, (self._own,))
                weights = await node.run_sync(VersionWeights.of, tensors)
                self._check_weights(weights, history.manifests[version].record)
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
        written = await read_note(node.state, name.path)
        files = written.files
        # Objects first, then the signature that names them. If the manifest is signed already, a crash came after that:
        # its patch is in storage, and only the digest of the weights is computed again.
        signed = history.manifests.get(name.version)
        if signed is None:
            weights, patch, anchor = await self._build(name.version, files)
            self._check_written(name.version, written)
            signed = await self._sign_manifest(name, weights, patch, anchor)
        else:
            tensors = await self._encode(name.version, files, self._hosts)
            weights = await node.run_sync(VersionWeights.of, tensors)
        manifest = signed.record
        self._check_weights(weights, manifest)
        # From here on every step may be repeated with the same bytes, and followers see them in an order in which
        # nothing is named before it is there: anchor (if there is no other way to the version), manifest, head.
        if manifest.patch is None and manifest.version not in history.anchors:
            await self._upload_shards(manifest)
        await node.publish(paths.manifest(node.key.public, manifest.version, signed.digest), signed.data)
        await self._heads.write(manifest.version)
        # A crash before the mark: all of this is done again, and the version is logged twice, never not at all. A crash
        # after it: the snapshot is found to be published, and only deleted.
        self._node.telemetry.event(
            "published",
            version=manifest.version,
            optimizer_step=manifest.optimizer_step,
            first_window=manifest.first_window,
            patch_bytes=manifest.patch.size if manifest.patch else 0,
            changed=manifest.patch.changed if manifest.patch else 0,
            elements=manifest.elements,
        )
        await history.mark_published(manifest.version, files)
        await node.state.delete(name.path)
        # An anchor beside a patch is for nodes that join later, so it delays no version.
        if manifest.anchor and manifest.version not in history.anchors:
            nursery.start_soon(self._upload_anchor, manifest)
        await history.delete_needless_weights(self._uploading)
        await self._delete_unnamed_objects()

    def _check_written(self, version: int, written: WrittenWeights) -> None:
        """Compare what each host has read of a snapshot with what its ranks have written, before it is signed.

        The state's digests find what a disk has lost; this finds what a process has lost after it has read, and files
        of another attempt. What a rank had lost before it computed its digest is not found.
        """
        place, remedy = f"{weights_folder(version)} of this node's state", f"remove {OUTBOX}{version:010d}-*"
        if not written.digests:
            raise StateError(place, f"written by another version of the program; {remedy} from the state of host 0")
        digests = [VersionWeights.of(encoded.tensors).digest for encoded in self._encoded]
        # A host may have had no files; others may train together now than those that have written the snapshot.
        pairs = zip_longest(digests, written.digests, fillvalue=weights_digest({}, {}))
        for host, (digest, written_digest) in enumerate(pairs):
            if digest != written_digest:
                what = f"host {host} has read other weights than its rank has written; start it again"
                raise StateError(place, f"{what}, and if that repeats {remedy} from the state of host 0")

    def _check_weights(self, weights: VersionWeights, manifest: Manifest) -> None:
        if weights.digest != manifest.weights:
            raise StateError(
                f"{weights_folder(manifest.version)} of this node's state",
                f"not the weights of the manifest that was signed for version {manifest.version}",
            )

    async def _of_all(
        self, ask: Callable[[HostFiles], Awaitable[Result]], hosts: Sequence[HostFiles] = ()
    ) -> list[Result]:
        """Return what each host answers, by default all of them."""
        hosts = hosts or self._hosts
        return await gather(ask, hosts, len(hosts), errors=(PatchError, StateError))

    async def _encode(
        self, version: int, files: int, hosts: Sequence[HostFiles], base: Base | None = None
    ) -> dict[str, EncodedTensor]:
        """Return what the hosts have of a version; PatchError if one cannot encode its changes."""
        self._encoded = ()  # before there are those of another version
        self._encoded = await self._of_all(lambda host: host.encode(version, base), hosts)
        if (found := sum(encoded.files for encoded in self._encoded)) != files:
            place, what = f"{weights_folder(version)} of this node's state", f"{found} of {files} files are there"
            if self._others:
                counts = ", ".join(f"{encoded.files} on host {host}" for host, encoded in enumerate(self._encoded))
                what += f" ({counts}); remove {OUTBOX}{version:010d}-* from the state of host 0"
            raise StateError(place, what)
        return {name: tensor for encoded in self._encoded for name, tensor in encoded.tensors.items()}

    async def _build(self, version: int, files: int) -> tuple[VersionWeights, PatchRef | None, tuple[ObjectRef, ...]]:
        """Return a version's weights, its uploaded patch if that succeeds, and the shards of its anchor if any."""
        tensors, patch_ref = await self._build_patch(version, files) if version else (None, None)
        tensors = tensors or await self._encode(version, files, self._hosts)
        weights: VersionWeights = await self._node.run_sync(VersionWeights.of, tensors)
        if patch_ref is not None and not self._needs_anchor(version, patch_ref):
            return weights, patch_ref, ()
        refs = dict[int, ObjectRef]()
        for own_refs in await self._of_all(lambda host: host.references(version)):
            refs |= own_refs
        return weights, patch_ref, tuple(refs[number] for number in range(files))

    async def _upload_patch(self, patch: bytes, changed: int) -> PatchRef | None:
        """Upload a patch; return None if storage refuses a part. Each host uploads the parts that are of its frames
        alone, and this one the others, and those that another host could not upload.
        """
        # The parts are uploaded before the manifest is signed: if storage refuses one, the version gets an anchor
        # instead, and a manifest that is signed can no longer say so.
        node, refs, offset = self._node, list[ObjectRef](), 0
        work: dict[HostFiles, list[tuple[bytes, ObjectRef, int]]] = {host: [] for host in self._hosts}
        sizes = [sum(tensor.row.size for tensor in encoded.tensors.values()) for encoded in self._encoded]
        ends = [*accumulate(sizes, initial=len(patch) - sum(sizes))]
        for part in await node.run_sync(split_parts, patch, self._settings.part_bytes):
            refs.append(await node.run_sync(reference, part))
            owners = [n for n, (begin, end) in enumerate(pairwise(ends)) if begin <= offset <= end - len(part)]
            owner = owners[0] if owners else 0
            work[self._hosts[owner]].append((part, refs[-1], offset - ends[owner]))
            offset += len(part)

        async def upload(host: HostFiles) -> bool:
            for part, ref, place in work[host]:
                path = paths.patch(node.key.public, ref.digest)
                is_there = (
                    host is not self._own and await host.put_part(place, ref) and await node.is_readable(path, part)
                )
                if not is_there and not await self._own.upload_part(part, ref):
                    return False
            return True

        return PatchRef(parts=tuple(refs), changed=changed) if all(await self._of_all(upload)) else None

    def _needs_anchor(self, newest: int, patch: PatchRef) -> bool:
        """Whether who joins fetches less with an anchor here than with the patches since the last, or it is time."""
        nbytes, retired = patch.size, self._history.retired_anchors  # such as those that storage lost
        for version in range(newest - 1, -1, -1):
            earlier = self._history.manifests.get(version)
            if earlier is None or earlier.record.patch is None or (earlier.record.anchor and version not in retired):
                break
            nbytes += earlier.record.patch.size
        # One at a time: on a slow link, anchors must not delay each other and the patches.
        is_cheaper = not self._uploading and nbytes >= self._history.manifests[newest - 1].record.weight_bytes
        return is_cheaper or newest % self._settings.anchor_interval == 0

    async def _build_patch(self, version: int, files: int) -> tuple[dict[str, EncodedTensor] | None, PatchRef | None]:
        """Return a version's encoded tensors and its uploaded patch, both measured; None if the codec is at fault."""
        node, history, base_version = self._node, self._history, version - 1
        before = history.manifests[base_version].record
        anchor = before.anchor if base_version in history.anchors else ()
        base_files = await count_shards(node.state, published_path(base_version))
        needed_versions = self._uploading | {manifest.version for manifest in history.incomplete_anchors()}
        try:
            base = Base(base_version, base_files, anchor, needed_versions)
            tensors = await self._encode(version, files, self._hosts, base)
            patch = await node.run_sync(build_patch, tensors, self._settings.profile, before.weights)
        except PatchError as error:
            node.telemetry.event("patch-refused", version=version, error=str(error))
            return None, None
        node.telemetry.event(
            "patch",
            version=version,
            profile=self._settings.profile,
            weight_bytes=before.weight_bytes,
            patch_bytes=len(patch),
            encode_seconds=max(encoded.encode_seconds for encoded in self._encoded),
            apply_seconds=max(encoded.apply_seconds for encoded in self._encoded),
        )
        changed = sum(tensor.row.changed for tensor in tensors.values())
        return tensors, await self._upload_patch(patch, changed)

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
        """Upload the files of a version's weights as the shards of its anchor, each host its own."""
        node = self._node
        while True:
            numbers = await self._of_all(lambda host: host.put_files(manifest.version, manifest.anchor))
            if len({*chain.from_iterable(numbers)}) < len(manifest.anchor):
                # Without its files on host 0 a repair gives this anchor up, and keeps the rest.
                what = f"; remove {weights_folder(manifest.version)} from the state of host 0" if self._others else ""
                place = f"{weights_folder(manifest.version)} of this node's state"
                raise StateError(place, f"files of it are lost{what}")
            # Whether another host writes to the storage that this one reads, this one has to see.
            missing_path = await self._missing_shard(manifest) if self._others else None
            if missing_path is None:
                return await self._history.complete_anchor(manifest)
            node.telemetry.event("put-lost", path=missing_path, error="another host has stored it and it is not there")
            await trio.sleep(_LOST_SECONDS)

    async def _upload_anchor(self, manifest: Manifest) -> None:
        """Upload an anchor while later versions are published, then write a head that names it."""
        # `_uploading` keeps the files until the upload has ended, also if the version leaves the chain meanwhile.
        self._uploading.add(manifest.version)
        await self._upload_shards(manifest)
        self._uploading.remove(manifest.version)
        await self._heads.write(self._history.published_version)
        await self._history.delete_needless_weights(self._uploading)

    async def _delete_unnamed_objects(self) -> None:
        """Retire what the head names no more, and delete what no valid head can name. Failures are tried again."""
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
