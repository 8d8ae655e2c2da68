"""The upload process: snapshots in, a chain in storage out (docs/spec/chain.md).

For every snapshot, in order of version: diff and encode, sign the manifest and remember it, put the data, put the
manifest, put the head, remember that it is published. Each step can be done again with the same bytes, so a process
killed anywhere goes on where it was. Anchors are uploaded beside it and shown by the head once they are complete.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.digest import content_digest
from protocol.errors import ChainError, PatchError
from protocol.identity.signing import Signed, sign
from protocol.patch import EncodedPatch
from roles.node.identity import Node
from roles.policy.follower import VerifiedWeights
from roles.ports import NotFoundError, StoreError
from roles.trainer.publish.fencing import Fence
from roles.trainer.publish.history import HeadStamp, History, make_head
from roles.trainer.publish.key_migration import move_in
from roles.trainer.publish.rate_meter import PatchMeasurement, RateMeter
from roles.trainer.publish.retention import DeletionSchedule
from roles.trainer.publish.version_build import (
    PublicationMoment,
    VersionObjects,
    check_patch,
    encode_patch,
    hold,
    make_manifest,
    make_shards,
)
from roles.trainer.spool import SnapshotName, get_snapshot, list_snapshots


@dataclass(frozen=True)
class PublisherSettings:
    """What a trainer's operator decides.

    Attributes:
        anchor_interval: versions between anchors.
        keep_patches, keep_anchors: retention.
        shard_bytes: size of an anchor's shards.
        patch_attempts: tries to upload a patch before the version becomes an anchor.
        poll_seconds: how often to look for a snapshot.
        settle_seconds: how long a start waits for another trainer under its key to show itself.
        mark_ms: milliseconds by which this start's heads expire sooner, drawn anew at each start, so that no two starts
            that happen at the same moment write the same head.
        profile: of the patches: "compact", "fast" or "auto".
        link_mbps: megabits a second that "auto" reckons with; None: what this node's uploads were measured at.
    """

    anchor_interval: int = 50
    keep_patches: int = 100
    keep_anchors: int = 10
    shard_bytes: int = 1 << 30
    patch_attempts: int = 3
    poll_seconds: float = 0.05
    settle_seconds: float = 1.0
    mark_ms: int = 0
    profile: str = "compact"
    link_mbps: float | None = None


_LOOK_SECONDS: Final = 1.0  # between two looks at a clock that somebody may set


class Publisher:
    """Publishes the snapshots of one trainer."""

    def __init__(self, node: Node, history: History, settings: PublisherSettings) -> None:
        self._node = node
        self._history = history
        self._settings = settings
        self._fence = Fence(node, history)
        self._held: VerifiedWeights | None = None
        self._head_lock = trio.Lock()
        self._shown = history.published
        self._expires = 0.0  # of the head that is shown, its mark aside; seconds since the Unix epoch
        self._deletions = DeletionSchedule(node.run.head_ttl)
        self._meter = RateMeter(settings.link_mbps * 1e6 / 8 if settings.link_mbps else None)

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
                waiting = await list_snapshots(self._node.state)
                if not waiting:
                    await trio.sleep(self._settings.poll_seconds)
                    continue
                await self._publish(waiting[0], nursery)

    async def _take_over(self) -> None:
        """See that what is published is what this node remembers, begin a new epoch, show it, and let a twin notice."""
        node, history = self._node, self._history
        await history.tidy()
        await self._fence.begin()
        if history.published >= 0:
            weights = await history.weights()
            self._held = await node.run_sync(hold, history.published, weights, None)
            if self._held.digest != history.manifests[history.published].record.weights:
                raise ChainError("the kept weights are not those that were published", f"version {history.published}")
        if history.writer not in (None, node.key.public):
            assert history.writer is not None
            await move_in(node, history, history.writer, self._head(history.published))
        await history.set_writer(node.key.public)
        await self._give_up_lost_anchors()
        if history.published >= 0:
            await self._write_head(history.published)
            await trio.sleep(self._settings.settle_seconds)
            await self._write_head(history.published)

    async def _give_up_lost_anchors(self) -> None:
        """Name no anchor that storage has lost, if the chain can be followed from another one."""
        history = self._history
        for version in sorted(version for version in history.anchors if version <= history.published):
            lost = await self._lost_shard(history.manifests[version].record)
            if lost is None:
                continue
            others = [other for other in history.anchors if other != version and other >= history.first_patch - 1]
            self._node.telemetry.event("anchor-lost", version=version, path=lost, given_up=bool(others))
            if others:
                await history.give_up_anchors({version})

    async def _lost_shard(self, manifest: Manifest) -> str | None:
        """Return the path of a shard of a version's anchor that storage says is not there; None while it shows all."""
        for ref in manifest.anchor:
            path = paths.anchor(self._node.key.public, ref.digest)
            try:
                await self._node.store.get(path, 1, offset=ref.size - 1, size=1)
            except NotFoundError:
                return path
            except StoreError:
                continue  # no answer says nothing
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
        held: VerifiedWeights = await node.run_sync(hold, name.version, weights, self._held)
        promised = history.manifests.get(name.version) or await self._promise(name, await self._make(held))
        manifest = promised.record
        if manifest.patch is None and manifest.version not in history.anchors:
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

    async def _make(self, held: VerifiedWeights) -> VersionObjects:
        """What the version consists of, its patch uploaded. A patch that fails, here or in the store, becomes an
        anchor.
        """
        if self._held is not None:
            try:
                patch, changed = await self._make_patch(held, self._held)
            except PatchError as error:
                self._node.telemetry.event("patch-refused", version=held.version, error=str(error))
                return VersionObjects(held, None, 0, self._shards(held))
            if await self._put_patch(patch):
                due = held.version % self._settings.anchor_interval == 0
                return VersionObjects(held, patch, changed, self._shards(held) if due else ())
        return VersionObjects(held, None, 0, self._shards(held))

    async def _make_patch(self, held: VerifiedWeights, before: VerifiedWeights) -> tuple[bytes, int]:
        """The patch from the version before, and how many elements it changes; both ways are timed.

        Raises:
            PatchError: the codec is at fault.
        """
        run_sync, settings = self._node.run_sync, self._settings
        began = trio.current_time()
        encoded: EncodedPatch = await run_sync(encode_patch, held, before, settings.profile, self._meter.conditions())
        between = trio.current_time()
        changed: int = await run_sync(check_patch, encoded.patch, held, before)
        weight_bytes = sum(tensor.nbytes for tensor in held.weights.values())
        made = PatchMeasurement(
            encoded.choice.profile, weight_bytes, len(encoded.patch), between - began, trio.current_time() - between
        )
        self._meter.add_patch(made)
        self._node.telemetry.event("patch", version=held.version, reason=encoded.choice.reason, **asdict(made))
        return encoded.patch, changed

    def _shards(self, held: VerifiedWeights) -> tuple[bytes, ...]:
        return make_shards(held.weights, self._settings.shard_bytes)

    async def _put_patch(self, patch: bytes) -> bool:
        """Upload a patch; whether it worked within the attempts allowed."""
        path = paths.patch(self._node.key.public, content_digest(patch))
        for _ in range(self._settings.patch_attempts):
            began = trio.current_time()
            try:
                await self._node.store.put(path, patch)
            except StoreError as error:
                self._node.telemetry.event("put-failed", path=path, error=str(error))
            else:
                self._meter.add_upload(len(patch), trio.current_time() - began)
                if await self._node.is_readable(path, patch):
                    return True
        return False

    async def _promise(self, name: SnapshotName, objects: VersionObjects) -> Signed[Manifest]:
        """Sign a manifest and remember it, with its shards, before the version can be seen."""
        node, history = self._node, self._history
        before = history.manifests.get(name.version - 1)
        if before is not None and before.record.beacon_round > 1:  # 1 is also said before the beacon begins
            node.time.record_round(before.record.beacon_round)  # whatever the clock says, it is later than that
        beacon_round = await node.time.wait_for_newest_round()  # what is signed by a wrong clock stays signed
        moment = PublicationMoment(
            run_id=node.run_id,
            previous=before.digest if before else b"",
            optimizer_step=name.optimizer_step,
            beacon_round=max(1, beacon_round),
            first_window=self._first_window(before.record.first_window, beacon_round) if before else 0,
            epoch=history.epoch,
        )
        manifest = make_manifest(objects, moment)
        await history.keep_shards(manifest, objects.shards)
        return await history.promise(sign(manifest, node.key))

    def _first_window(self, before: int, beacon_round: int) -> int:
        """The first window that a version made at a round may serve: everyone has `lead` windows to fetch it."""
        schedule = self._node.run.schedule
        return max(before, schedule.window_at(beacon_round) + schedule.lead)

    async def _upload_shards(self, manifest: Manifest) -> None:
        for ref in manifest.anchor:
            shard = await self._history.shard(manifest, ref)
            await self._node.publish(paths.anchor(self._node.key.public, ref.digest), shard)
        await self._history.complete_anchor(manifest)

    async def _upload_anchor(self, manifest: Manifest) -> None:
        """Upload an anchor beside the chain's growth, then show it."""
        await self._upload_shards(manifest)
        await self._write_head(self._history.published)

    def _head(self, newest: int, expires_ms: int = 0) -> Head:
        """The head that shows everything up to a version."""
        node, settings = self._node, self._settings
        stamp = HeadStamp(node.run_id, node.revisions.number, expires_ms)
        return make_head(self._history, newest, settings.keep_patches, settings.keep_anchors, stamp)

    async def _write_head(self, newest: int) -> None:
        """Put a head that shows everything up to a version, unless another trainer has taken over.

        Raises:
            FencedError: it has.
        """
        node = self._node
        await (
            node.time.wait_for_newest_round()
        )  # outside of the lock: what waits here for the right time holds nobody up
        async with self._head_lock:
            with suppress(StoreError):  # a store that does not answer shows no other trainer; the put is retried anyway
                await self._fence.check()
            self._shown = max(newest, self._shown)  # an anchor's upload may end between a head and its bookkeeping
            self._expires = await node.time.proven_time() + node.run.head_ttl
            expires_ms = int(self._expires * 1000) - self._settings.mark_ms
            head = self._head(self._shown, expires_ms)
            self._fence.add_own_head(content_digest(head.to_bytes()))
            await node.publish(paths.head(node.key.public), sign(head, node.key))

    async def _renew_head(self) -> None:
        """Sign the head again before it expires, for as long as this process lives, and when the clock was set."""
        node = self._node
        while True:
            await trio.sleep(_LOOK_SECONDS)
            left = self._expires - node.time.now()
            if self._history.published >= 0 and not node.run.head_ttl * 2 / 3 < left <= node.run.head_ttl:
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
        """Give up what the head does not name any more, and delete what no head that counts can name."""
        history, settings, key = self._history, self._settings, self._node.key.public
        if history.published % max(1, settings.keep_patches // 10):
            return
        head = self._head(history.published)
        await history.give_up(head)
        available: set[str] = set()
        for version, signed in history.manifests.items():
            available.add(paths.manifest(key, version, signed.digest))
            if signed.record.patch is not None and version >= history.first_patch:
                available.add(paths.patch(key, signed.record.patch.object.digest))
            if version not in history.given_up:
                available |= {paths.anchor(key, ref.digest) for ref in signed.record.anchor}
        unnamed: set[str] = set()
        try:
            for prefix in (paths.manifests(key), paths.patches(key), paths.anchors(key)):
                unnamed |= {item.path async for item in self._node.store.list(prefix) if item.path not in available}
            for path in self._deletions.due(unnamed, trio.current_time()):
                await self._node.store.delete(path)
        except StoreError as error:
            self._node.telemetry.event("sweep-failed", error=str(error))
