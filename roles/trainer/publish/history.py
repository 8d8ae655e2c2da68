"""What the publisher has published, durably: manifests as they were signed, which anchors are complete, the last
weights.

chain/epoch                   the fencing epoch of the newest start
chain/writer                  the public key in whose space the chain lies
chain/manifests/{version}     signed manifests, written before anything of the version is uploaded: after a crash the
                              very same bytes are uploaded again, so no version ever has two manifests
chain/anchors/{version}       an empty note: this anchor is complete in storage
chain/shards/{version}-{digest}  anchor shards that are still to be uploaded
chain/published/{version}     the weights of the newest published version (safetensors)
"""

from dataclasses import dataclass

from protocol import limits
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, ObjectRef
from protocol.digest import Weights
from protocol.errors import ChainError
from protocol.identity.signing import Signed, open_announced
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.spool import PUBLISHED, last_published

_EPOCH = "chain/epoch"
_WRITER = "chain/writer"
_MANIFESTS = "chain/manifests/"
_ANCHORS = "chain/anchors/"
_SHARDS = "chain/shards/"


class History:
    """The publisher's own record of its chain."""

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self.manifests: dict[int, Signed[Manifest]] = {}
        self.anchors: set[int] = set()
        self.epoch = 0
        self.published = -1
        self.writer: bytes | None = None

    @classmethod
    async def open(cls, state: ObjectStore) -> "History":
        """The record as the last run left it.

        Raises:
            StoreError, ProtocolError: the state is damaged.
        """
        history = cls(state)
        async for item in state.list(_MANIFESTS):
            signed = open_announced(await state.get(item.path, limits.MAX_RECORD_BYTES * 2), Manifest)
            history.manifests[signed.record.version] = signed
        async for item in state.list(_ANCHORS):
            history.anchors.add(int(item.path.removeprefix(_ANCHORS)))
        try:
            history.epoch = int(await state.get(_EPOCH, 32))
        except NotFoundError:
            history.epoch = 0
        try:
            history.writer = await state.get(_WRITER, 32)
        except NotFoundError:
            history.writer = None
        history.published = await last_published(state)
        return history

    async def tidy(self) -> None:
        """Delete what a crash left behind; for the publisher alone, who is the only writer."""
        await self._drop_needless_shards()
        await self._drop_older_weights()
        for version in sorted(self.anchors - self.manifests.keys()):
            await self._state.delete(f"{_ANCHORS}{version:010d}")
            self.anchors.discard(version)

    async def set_writer(self, key: bytes) -> None:
        """Remember in whose space the chain lies now."""
        await self._state.put(_WRITER, key)
        self.writer = key

    async def _drop_needless_shards(self) -> None:
        """Delete shards that a crash left behind: of anchors that are complete, and of versions that were never
        promised.
        """
        needed = {
            _shard(version, ref)
            for version, signed in self.manifests.items()
            if version not in self.anchors
            for ref in signed.record.anchor
        }
        for path in [item.path async for item in self._state.list(_SHARDS) if item.path not in needed]:
            await self._state.delete(path)

    async def begin_epoch(self, epoch: int) -> None:
        """Remember the fencing epoch of this start."""
        await self._state.put(_EPOCH, str(epoch).encode())
        self.epoch = epoch

    async def promise(self, data: bytes) -> Signed[Manifest]:
        """Remember a signed manifest before any of its version is uploaded."""
        signed = open_announced(data, Manifest)
        await self._state.put(f"{_MANIFESTS}{signed.record.version:010d}", data)
        self.manifests[signed.record.version] = signed
        return signed

    async def keep_shards(self, manifest: Manifest, shards: tuple[bytes, ...]) -> None:
        """Keep an anchor's shards until they are uploaded."""
        for ref, data in zip(manifest.anchor, shards, strict=True):
            await self._state.put(_shard(manifest.version, ref), data)

    async def shard(self, manifest: Manifest, ref: ObjectRef) -> bytes:
        """A shard of a manifest's anchor that was kept."""
        return await self._state.get(_shard(manifest.version, ref), ref.size)

    async def complete_anchor(self, manifest: Manifest) -> None:
        """Remember that an anchor is complete in storage; its shards need not be kept."""
        await self._state.put(f"{_ANCHORS}{manifest.version:010d}", b"")
        self.anchors.add(manifest.version)
        for ref in manifest.anchor:
            await self._state.delete(_shard(manifest.version, ref))

    def unfinished_anchors(self) -> list[Manifest]:
        """Published manifests whose anchor is not complete yet."""
        return [
            signed.record
            for version, signed in sorted(self.manifests.items())
            if signed.record.anchor and version not in self.anchors and version <= self.published
        ]

    async def finish(self, version: int, weights: Weights) -> None:
        """Remember that a version is published, and its weights, from which the next is diffed."""
        await self._state.put(f"{PUBLISHED}/{version:010d}", safetensors.write(weights))
        self.published = version
        await self._drop_older_weights()

    async def _drop_older_weights(self) -> None:
        kept = f"{PUBLISHED}/{self.published:010d}"
        for path in [item.path async for item in self._state.list(PUBLISHED + "/") if item.path < kept]:
            await self._state.delete(path)

    async def weights(self) -> Weights:
        """The weights of the newest published version.

        Raises:
            StoreError, ProtocolError: the state is damaged.
        """
        return safetensors.read(await self._state.get(f"{PUBLISHED}/{self.published:010d}", limits.MAX_SHARD_BYTES))

    async def forget_before(self, base: int) -> None:
        """Drop what concerns versions before `base`."""
        for version in [version for version in self.manifests if version < base]:
            await self._state.delete(f"{_MANIFESTS}{version:010d}")
            await self._state.delete(f"{_ANCHORS}{version:010d}")
            del self.manifests[version]
            self.anchors.discard(version)


def _shard(version: int, ref: ObjectRef) -> str:
    """Where a shard is kept. Two versions with equal tensors have equal shards, and each its own copy here."""
    return f"{_SHARDS}{version:010d}-{ref.digest.hex()}"


def kept_range(published: int, anchors: set[int], patches: int, most_anchors: int) -> tuple[tuple[int, ...], int]:
    """Retention: the anchors that are kept, ascending, and the oldest patch that is kept.

    Kept are the last `patches` patches, the last `most_anchors` anchors, and the anchor that the oldest kept patch
    hangs on (with the patches between, so that it leads somewhere); of all these no more than a head can list.

    Raises:
        ChainError: no anchor is near enough to the newest version.
    """
    anchors = {version for version in anchors if version > published - limits.MAX_CHAIN}
    if not anchors:
        raise ChainError(
            f"no anchor of the last {limits.MAX_CHAIN} versions got into storage, so no head can show the chain; "
            "look at the storage, and set trainer.anchor_interval lower",
            f"version {published}",
        )
    wanted = max(0, published - patches)
    hung_on = max((version for version in anchors if version <= wanted), default=min(anchors))
    kept = sorted({hung_on, *sorted(anchors)[-most_anchors:]})
    return tuple(kept), hung_on + 1


@dataclass(frozen=True)
class HeadStamp:
    """What a head says beside the chain: the run, the revision of the authority that its publisher knows, and its
    expiry.
    """

    run_id: bytes
    revision: int
    expires_ms: int


def make_head(history: History, newest: int, patches: int, anchors: int, stamp: HeadStamp) -> Head:
    """The head that shows everything up to a version."""
    complete = {version for version in history.anchors if version <= newest}
    kept, oldest_patch = kept_range(newest, complete, patches, anchors)
    base = kept[0]
    return Head(
        run=stamp.run_id,
        epoch=history.epoch,
        base=base,
        manifests=tuple(history.manifests[version].digest for version in range(base, newest + 1)),
        anchors=kept,
        oldest_patch=oldest_patch,
        revision=stamp.revision,
        expires_ms=stamp.expires_ms,
    )
