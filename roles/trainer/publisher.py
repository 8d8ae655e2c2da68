"""The upload process: snapshots in, a chain in storage out (docs/spec/chain.md).

For every snapshot, in order of version: diff and encode, sign the manifest and remember it, put the data, put the manifest, put
the head, remember that it is published. Each step can be done again with the same bytes, so a process killed anywhere goes
on where it was. Anchors are uploaded beside it and shown by the head once they are complete.
"""

from dataclasses import dataclass

import trio

from protocol import limits, paths
from protocol.chain import Head, Manifest
from protocol.digest import content_digest
from protocol.errors import ChainError, PatchError, ProtocolError
from protocol.signing import Signed, open_signed, sign
from roles.follower import Held
from roles.node import Node
from roles.ports import NotFoundError, StoreError
from roles.trainer.history import History, Stamp, make_head
from roles.trainer.publication import Moment, Objects, hold, make_manifest, make_patch, make_shards
from roles.trainer.spool import SnapshotName, get_snapshot, snapshots


class FencedError(Exception):
    """Another trainer publishes under this key; this one must stop."""


@dataclass(frozen=True)
class PublisherSettings:
    """What a trainer's operator decides.

    Attributes:
        anchor_interval: versions between anchors.
        keep_patches, keep_anchors: retention.
        shard_bytes: size of an anchor's shards.
        patch_attempts: tries to upload a patch before the version becomes an anchor.
        poll_seconds: how often to look for a snapshot.
    """

    anchor_interval: int = 50
    keep_patches: int = 100
    keep_anchors: int = 10
    shard_bytes: int = 1 << 30
    patch_attempts: int = 3
    poll_seconds: float = 0.05


class Publisher:
    """Publishes the snapshots of one trainer."""

    def __init__(self, node: Node, history: History, settings: PublisherSettings) -> None:
        self._node = node
        self._history = history
        self._settings = settings
        self._held: Held | None = None
        self._head_lock = trio.Lock()
        self._shown = history.published
        self._doomed: set[str] = set()

    async def run(self) -> None:
        """Publish for ever.

        Raises:
            FencedError: another trainer took over.
            ChainError: what is published is not what this node's state says; refusing to go on.
        """
        await self._take_over()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.keep_announced, "trainer", 600.0)
            nursery.start_soon(self._renew_head)
            for manifest in self._history.unfinished_anchors():
                nursery.start_soon(self._upload_anchor, manifest)
            while True:
                waiting = await snapshots(self._node.state)
                if not waiting:
                    await trio.sleep(self._settings.poll_seconds)
                    continue
                await self._publish(waiting[0], nursery)

    async def _take_over(self) -> None:
        """Begin a new epoch, and see that what is published is what this node remembers."""
        head = await self._published_head()
        history = self._history
        if head is not None:
            ours = history.manifests.get(head.version)
            if head.version > history.published + 1 or ours is None or ours.digest != head.digest(head.version):
                raise ChainError(
                    f"storage shows version {head.version}, which this node's state did not publish; "
                    "use the state it was published from, or a new run",
                    "resume",
                )
        await history.begin_epoch(max(history.epoch, head.epoch if head else 0) + 1)
        if history.published >= 0:
            weights = await history.weights()
            self._held = await self._node.run_sync(hold, history.published, weights, None)
            if self._held.digest != history.manifests[history.published].record.weights:
                raise ChainError("the kept weights are not those that were published", f"version {history.published}")

    async def _published_head(self) -> Head | None:
        """The head in storage; None where there is none. What is no head of ours is a stranger's, and is written over."""
        path = paths.head(self._node.key.public)
        try:
            data = await self._node.store.get(path, limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
            return open_signed(data, Head, [self._node.key.public]).record
        except NotFoundError:
            return None
        except ProtocolError as error:
            self._node.telemetry.event("strange-head", path=path, error=str(error))
            return None

    async def _publish(self, name: SnapshotName, nursery: trio.Nursery) -> None:
        node, history = self._node, self._history
        if name.version <= history.published:
            await node.state.delete(name.path)  # published before the crash that kept it here
            return
        if name.version != history.published + 1:
            raise ChainError(
                f"the outbox begins with version {name.version}, {history.published} is published", "outbox"
            )
        weights = await get_snapshot(node.state, name)
        held: Held = await node.run_sync(hold, name.version, weights, self._held)
        promised = history.manifests.get(name.version) or await self._promise(name, await self._make(held))
        manifest = promised.record
        if manifest.patch is None:
            await self._upload_shards(manifest)
        await node.publish(paths.manifest(node.key.public, manifest.version, promised.digest), promised.data)
        await self._write_head(manifest.version)
        await history.finish(manifest.version, held.weights)
        await node.state.delete(name.path)
        self._held = held
        self._report(manifest)
        if manifest.anchor and manifest.version not in history.anchors:
            nursery.start_soon(self._upload_anchor, manifest)
        await self._sweep()

    async def _make(self, held: Held) -> Objects:
        """What the version consists of, its patch uploaded. A patch that fails, here or in the store, becomes an anchor."""
        if self._held is not None:
            try:
                patch, changed = await self._node.run_sync(make_patch, held, self._held)
            except PatchError as error:
                self._node.telemetry.event("patch-refused", version=held.version, error=str(error))
                return Objects(held, None, 0, self._shards(held))
            if await self._put_patch(patch):
                due = held.version % self._settings.anchor_interval == 0
                return Objects(held, patch, changed, self._shards(held) if due else ())
        return Objects(held, None, 0, self._shards(held))

    def _shards(self, held: Held) -> tuple[bytes, ...]:
        return make_shards(held.weights, self._settings.shard_bytes)

    async def _put_patch(self, patch: bytes) -> bool:
        """Upload a patch; whether it worked within the attempts allowed."""
        path = paths.patch(self._node.key.public, content_digest(patch))
        for _ in range(self._settings.patch_attempts):
            try:
                await self._node.store.put(path, patch)
            except StoreError as error:
                self._node.telemetry.event("put-failed", path=path, error=str(error))
            else:
                return True
        return False

    async def _promise(self, name: SnapshotName, objects: Objects) -> Signed[Manifest]:
        """Sign a manifest and remember it, with its shards, before the version can be seen."""
        node, history = self._node, self._history
        before = history.manifests.get(name.version - 1)
        moment = Moment(
            run_id=node.run_id,
            previous=before.digest if before else b"",
            optimizer_step=name.optimizer_step,
            beacon_round=max(1, node.run.beacon.round_at(node.clock.now())),
            first_window=self._first_window(before.record.first_window) if before else 0,
            epoch=history.epoch,
        )
        manifest = make_manifest(objects, moment)
        await history.keep_shards(manifest, objects.shards)
        return await history.promise(sign(manifest, node.key))

    def _first_window(self, before: int) -> int:
        """The first window that a version made now may serve: everyone has `lead` windows to fetch it."""
        return max(before, self._node.window() + self._node.run.schedule.lead)

    async def _upload_shards(self, manifest: Manifest) -> None:
        for ref in manifest.anchor:
            await self._node.publish(paths.anchor(self._node.key.public, ref.digest), await self._history.shard(ref))
        await self._history.complete_anchor(manifest)

    async def _upload_anchor(self, manifest: Manifest) -> None:
        """Upload an anchor beside the chain's growth, then show it."""
        await self._upload_shards(manifest)
        await self._write_head(self._history.published)

    async def _write_head(self, newest: int) -> None:
        """Put a head that shows everything up to a version, unless another trainer has taken over.

        Raises:
            FencedError: it has.
        """
        node, settings = self._node, self._settings
        async with self._head_lock:
            try:
                current = await self._published_head()
            except StoreError:
                current = None
            if current is not None and current.epoch > self._history.epoch:
                raise FencedError(
                    f"another trainer publishes under this key (epoch {current.epoch}, this one {self._history.epoch})"
                )
            expires_ms = int((node.clock.now() + node.run.head_ttl) * 1000)
            self._shown = max(newest, self._shown)  # an anchor's upload may end between a head and its bookkeeping
            stamp = Stamp(node.run_id, node.revisions.number, expires_ms)
            head = make_head(self._history, self._shown, settings.keep_patches, settings.keep_anchors, stamp)
            await node.publish(paths.head(node.key.public), sign(head, node.key))

    async def _renew_head(self) -> None:
        """Sign the head again before it expires, for as long as this process lives."""
        while True:
            await self._node.clock.sleep_until(self._node.clock.now() + self._node.run.head_ttl / 3)
            if self._history.published >= 0:
                await self._write_head(self._history.published)

    def _report(self, manifest: Manifest) -> None:
        self._node.telemetry.event(
            "published",
            version=manifest.version,
            first_window=manifest.first_window,
            patch_bytes=manifest.patch.object.size if manifest.patch else 0,
            changed=manifest.patch.changed if manifest.patch else 0,
            elements=manifest.elements,
        )

    async def _sweep(self) -> None:
        """Delete what the head has not shown for two sweeps; a reader of the last head is not raced."""
        history, settings, key = self._history, self._settings, self._node.key.public
        if history.published % max(1, settings.keep_patches // 10):
            return
        stamp = Stamp(self._node.run_id, 0, 0)
        head = make_head(history, history.published, settings.keep_patches, settings.keep_anchors, stamp)
        await history.forget_before(head.base)
        kept: set[str] = set()
        for version, signed in history.manifests.items():
            kept.add(paths.manifest(key, version, signed.digest))
            if signed.record.patch is not None and version >= head.oldest_patch:
                kept.add(paths.patch(key, signed.record.patch.object.digest))
            if version in head.anchors or version not in history.anchors:
                kept |= {paths.anchor(key, ref.digest) for ref in signed.record.anchor}
        unwanted: set[str] = set()
        try:
            for prefix in (paths.manifests(key), paths.patches(key), paths.anchors(key)):
                unwanted |= {item.path async for item in self._node.store.list(prefix) if item.path not in kept}
            for path in sorted(unwanted & self._doomed):
                await self._node.store.delete(path)
        except StoreError as error:
            self._node.telemetry.event("sweep-failed", error=str(error))
        self._doomed = unwanted
