"""What the publisher has published, durably: manifests as they were signed, which anchors are complete, the last
weights.

chain/epoch                   the fencing epoch of the newest start
chain/writer                  the public key in whose space the chain lies
chain/manifests/{version}     signed manifests, written before anything of the version is uploaded: after a crash the
                              very same bytes are uploaded again, so no version ever has two manifests
chain/anchors/{version}       a note: this anchor is complete in storage (empty), or was given up and may be deleted
                              there ("given up")
chain/first-patch             patches of versions before this one were given up and may be deleted in storage
chain/shards/{version}-{digest}  anchor shards that are still to be uploaded
chain/published/{version}     the weights of the newest published version (safetensors)
"""

from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass

from protocol import limits
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest, ObjectRef
from protocol.digest import Weights
from protocol.errors import ChainError
from protocol.identity.signing import Signed, open_announced
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.publish.retention import kept_range
from roles.trainer.spool import PUBLISHED, newest_published_version

_EPOCH = "chain/epoch"
_WRITER = "chain/writer"
_MANIFESTS = "chain/manifests/"
_ANCHORS = "chain/anchors/"
_SHARDS = "chain/shards/"
_FIRST_PATCH = "chain/first-patch"
_GIVEN_UP = b"given up"


class History:
    """The publisher's own record of its chain.

    Attributes:
        manifests: the signed manifests by version, promised ones included.
        anchors: versions whose anchor is complete in storage and was never given up.
        given_up: versions whose anchor was complete and may be deleted in storage.
        first_patch: patches of versions before this one may be deleted in storage.
        epoch: the fencing epoch; published: the newest published version, -1 before the first; writer: the public key
            in whose space the chain lies.
    """

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self.manifests: dict[int, Signed[Manifest]] = {}
        self.anchors: set[int] = set()
        self.given_up: set[int] = set()
        self.first_patch = 0
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
            complete = await state.get(item.path, len(_GIVEN_UP)) != _GIVEN_UP
            (history.anchors if complete else history.given_up).add(int(item.path.removeprefix(_ANCHORS)))
        with suppress(NotFoundError):
            history.first_patch = int(await state.get(_FIRST_PATCH, 32))
        try:
            history.epoch = int(await state.get(_EPOCH, 32))
        except NotFoundError:
            history.epoch = 0
        try:
            history.writer = await state.get(_WRITER, 32)
        except NotFoundError:
            history.writer = None
        history.published = await newest_published_version(state)
        return history

    async def tidy(self) -> None:
        """Delete what a crash left behind; for the publisher alone, who is the only writer."""
        await self._drop_needless_shards()
        await self._drop_older_weights()
        for version in sorted((self.anchors | self.given_up) - self.manifests.keys()):
            await self._drop_anchor_note(version)

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
            if version not in self.anchors | self.given_up
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
            if signed.record.anchor and version <= self.published and version not in self.anchors | self.given_up
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
            await self._drop_anchor_note(version)
            del self.manifests[version]

    async def _drop_anchor_note(self, version: int) -> None:
        await self._state.delete(f"{_ANCHORS}{version:010d}")
        self.anchors.discard(version)
        self.given_up.discard(version)

    async def give_up(self, head: Head) -> None:
        """Strike off the record, durably, what a head of the newest published version leaves out.

        It is never named again, and may be deleted in storage once every head that may name it has expired.
        """
        before, self.first_patch = self.first_patch, max(self.first_patch, head.oldest_patch)
        await self.give_up_anchors({version for version in self.anchors if version <= head.version} - set(head.anchors))
        if self.first_patch != before:
            await self._state.put(_FIRST_PATCH, str(self.first_patch).encode())
        await self.forget_before(head.base)

    async def give_up_anchors(self, versions: Set[int]) -> None:
        """Strike complete anchors off the record, durably."""
        self.anchors -= versions  # first of all, so that no head that is made meanwhile names them
        self.given_up |= versions
        for version in sorted(versions):
            await self._state.put(f"{_ANCHORS}{version:010d}", _GIVEN_UP)

    def check_available(self, head: Head) -> None:
        """Refuse a head that names what this record does not call available.

        Raises:
            ChainError: an object that the head names was given up, or was never complete.
        """
        for version in head.anchors:
            if version not in self.anchors:
                raise ChainError("the head would name an anchor that is not in storage", f"version {version}")
        if head.oldest_patch < self.first_patch:
            raise ChainError("the head would name a patch that was given up", f"version {head.oldest_patch}")


def _shard(version: int, ref: ObjectRef) -> str:
    """Where a shard is kept. Two versions with equal tensors have equal shards, and each its own copy here."""
    return f"{_SHARDS}{version:010d}-{ref.digest.hex()}"


@dataclass(frozen=True)
class HeadStamp:
    """What a head says beside the chain: the run, the revision of the authority that its publisher knows, and its
    expiry.
    """

    run_id: bytes
    revision: int
    expires_ms: int


def make_head(history: History, newest: int, patches: int, anchors: int, stamp: HeadStamp) -> Head:
    """Return the head that shows everything up to a version.

    Raises:
        ChainError: no anchor is near enough, or the head would name what is not in storage.
    """
    complete = {version for version in history.anchors if version <= newest}
    kept, oldest_patch = kept_range(newest, complete, history.first_patch, patches, anchors)
    base = kept[0]
    head = Head(
        run=stamp.run_id,
        epoch=history.epoch,
        base=base,
        manifests=tuple(history.manifests[version].digest for version in range(base, newest + 1)),
        anchors=kept,
        oldest_patch=oldest_patch,
        revision=stamp.revision,
        expires_ms=stamp.expires_ms,
    )
    history.check_available(head)
    return head
