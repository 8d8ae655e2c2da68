"""The publisher's durable record of its chain, in the node's own state.

chain/epoch                      the fencing epoch of the newest start
chain/writer                     the public key in whose space the chain is
chain/manifests/{version}        signed manifests, written before anything of the version is uploaded: after a crash
                                 the very same bytes are uploaded again, so no version ever has two manifests
chain/anchors/{version}          empty for an anchor that is complete in storage, and "retired" for one that was and
                                 may be deleted there
chain/first-patch                patches of versions before this one are retired: they may be deleted in storage
chain/rewind                     the newest revision of the authority whose rewind this record contains
chain/weights/{version}          how many files the weights of the newest published version have

The files themselves are in weights/{version}/ (spool.py): the record needs those of the newest published version, and
of each version whose anchor is not complete yet, because they are its shards.
"""

from collections.abc import Set
from contextlib import suppress

from protocol import limits, paths
from protocol.chain.manifest import Head, Manifest
from protocol.errors import ChainError
from protocol.identity.signing import Signed, open_announced
from roles.ports import NotFoundError, ObjectStore, StateError
from roles.trainer.spool import (
    PUBLISHED_WEIGHTS,
    newest_published_version,
    published_path,
    stored_versions,
    weights_folder,
)
from roles.trainer.tensor_shards import delete_below

EPOCH = "chain/epoch"
WRITER = "chain/writer"
MANIFESTS = "chain/manifests/"
ANCHORS = "chain/anchors/"
FIRST_PATCH = "chain/first-patch"
REWIND = "chain/rewind"
RETIRED = b"retired"


class History:
    """The publisher's own record of its chain."""

    def __init__(self, state: ObjectStore) -> None:
        self._state = state
        self.manifests: dict[int, Signed[Manifest]] = {}  # signed, by version, including one that is not published yet
        self.anchors: set[int] = set()  # versions whose anchor is complete in storage and was never retired
        self.retired_anchors: set[int] = set()  # versions whose anchor was complete and may be deleted in storage
        self.first_patch = 0  # patches of versions before this one may be deleted in storage
        self.epoch = 0  # the fencing epoch
        self.published_version = -1  # the newest published version; -1 before the first
        self.writer: bytes | None = None  # the public key in whose space the chain is; None before the first start
        self.rewind = 0  # number of the newest revision of the authority whose rewind this record contains; 0 for none

    @classmethod
    async def open(cls, state: ObjectStore) -> "History":
        """Read the record, which changes nothing; a damaged state is a StateError, StoreError or ProtocolError."""
        history = cls(state)
        history.manifests = await read_manifests(state)
        async for item in state.list(ANCHORS):
            retired = await state.get(item.path, len(RETIRED)) == RETIRED
            (history.retired_anchors if retired else history.anchors).add(int(item.path.removeprefix(ANCHORS)))
        with suppress(NotFoundError):
            history.writer = await state.get(WRITER, 32)
        history.first_patch, history.epoch, history.rewind = [
            await read_number(state, path) for path in (FIRST_PATCH, EPOCH, REWIND)
        ]
        # The note on a version's files is also the mark that it is published: one put, so a crash leaves both or
        # neither. Its manifest was recorded long before that mark, so a mark without a manifest is damage.
        history.published_version = await newest_published_version(state)
        if history.published_version >= 0 and history.published_version not in history.manifests:
            raise StateError(
                f"{MANIFESTS} of this node's state",
                f"the manifest of published version {history.published_version} is missing",
            )
        return history

    @property
    def promised_version(self) -> int:
        """The newest version that followers may have seen: signed, and perhaps not yet recorded; -1 for none."""
        return max(self.manifests, default=-1)

    def has_signed(self, version: int, digest: bytes) -> bool:
        """Return whether the manifest with a digest is the one that this node has signed for a version."""
        return version in self.manifests and self.manifests[version].digest == digest

    async def clean_up(self) -> None:
        """Delete what a crash left over. Only the publisher may do it, because it is the only writer."""
        await self.delete_needless_weights()
        # `retire` deletes a manifest before the note on its anchor; a crash in between leaves the note alone.
        for version in sorted((self.anchors | self.retired_anchors) - self.manifests.keys()):
            await self._delete_anchor_note(version)

    async def set_writer(self, key: bytes) -> None:
        """Record in whose space the chain is now."""
        await self._state.put(WRITER, key)
        self.writer = key

    async def record_rewind(self, number: int) -> None:
        """Record the revision of the newest rewind that takes back nothing of this record."""
        await self._state.put(REWIND, str(number).encode())
        self.rewind = number

    async def take_back(self, version: int) -> None:
        """Forget all versions after one, which the roots take back."""
        for later_version in [number for number in self.manifests if number > version]:
            # The manifest goes last: as long as one is left, `promised_version` shows that there is something to do.
            await self._state.delete(published_path(later_version))
            await self._delete_anchor_note(later_version)
            await self._state.delete(f"{MANIFESTS}{later_version:010d}")
            del self.manifests[later_version]
        self.published_version = version

    async def begin_epoch(self, epoch: int) -> None:
        """Record the fencing epoch of this start."""
        await self._state.put(EPOCH, str(epoch).encode())
        self.epoch = epoch

    async def record_manifest(self, data: bytes) -> Signed[Manifest]:
        """Record a signed manifest. The publisher does it before it uploads anything of the version."""
        signed = open_announced(data, Manifest)
        await self._state.put(f"{MANIFESTS}{signed.record.version:010d}", data)
        self.manifests[signed.record.version] = signed
        return signed

    async def complete_anchor(self, manifest: Manifest) -> None:
        """Record that an anchor is complete in storage."""
        await self._state.put(f"{ANCHORS}{manifest.version:010d}", b"")
        self.anchors.add(manifest.version)

    def incomplete_anchors(self) -> list[Manifest]:
        """Return the published manifests whose anchor is not complete in storage yet."""
        return [
            signed.record
            for version, signed in sorted(self.manifests.items())
            if signed.record.anchor
            and version <= self.published_version
            and version not in self.anchors | self.retired_anchors
        ]

    async def mark_published(self, version: int, shards: int) -> None:
        """Record that a version is published, and how many files its weights have; the next patch is made of them."""
        await self._state.put(published_path(version), str(shards).encode())
        self.published_version = version

    async def delete_needless_weights(self, uploading: Set[int] = frozenset()) -> None:
        """Delete the weights before the newest published version, but for those whose anchor is being uploaded."""
        # Notes before files: a note says that its files are complete, so it must not outlive them.
        newest = published_path(self.published_version)
        for path in [item.path async for item in self._state.list(PUBLISHED_WEIGHTS) if item.path < newest]:
            await self._state.delete(path)
        # These files are the only copy of which an anchor's upload can be made, again after a crash. Those of the
        # newest published version and of later ones stay as well: the next patches are made of them.
        needed_versions = {manifest.version for manifest in self.incomplete_anchors()} | uploading
        for version in sorted(await stored_versions(self._state)):
            if version < self.published_version and version not in needed_versions:
                await delete_below(self._state, weights_folder(version))

    async def _delete_anchor_note(self, version: int) -> None:
        await self._state.delete(f"{ANCHORS}{version:010d}")
        self.anchors.discard(version)
        self.retired_anchors.discard(version)

    def available_paths(self, key: bytes) -> set[str]:
        """Return the paths, below a key, of all objects that a head may name now or later."""
        available: set[str] = set()
        for version, signed in self.manifests.items():
            available.add(paths.manifest(key, version, signed.digest))
            if signed.record.patch is not None and version >= self.first_patch:
                available |= {paths.patch(key, ref.digest) for ref in signed.record.patch.parts}
            if version not in self.retired_anchors:
                available |= {paths.anchor(key, ref.digest) for ref in signed.record.anchor}
        return available

    async def retire(self, head: Head) -> None:
        """Record that what a head of the newest published version leaves out will never be named again."""
        # Memory changes before the first await: while this task waits for the disk, another one, whose anchor is
        # complete now, may make a head, and that must not name what is retired here.
        previous_first_patch, self.first_patch = self.first_patch, max(self.first_patch, head.oldest_patch)
        anchors_up_to_head = {version for version in self.anchors if version <= head.version}
        await self.retire_anchors(anchors_up_to_head - set(head.anchors))
        # The disk follows before anything is deleted in storage: a publisher that starts again after a crash must not
        # name what may be gone.
        if self.first_patch != previous_first_patch:
            await self._state.put(FIRST_PATCH, str(self.first_patch).encode())
        # No later head lists a version before this base, so nothing of them needs to be known any more.
        for old_version in [number for number in self.manifests if number < head.base]:
            await self._state.delete(f"{MANIFESTS}{old_version:010d}")
            await self._delete_anchor_note(old_version)
            del self.manifests[old_version]

    async def retire_anchors(self, versions: Set[int]) -> None:
        """Record that the anchors of these versions will never be named again."""
        self.anchors -= versions  # before the first await, so that no head that is made meanwhile names them
        self.retired_anchors |= versions
        for version in sorted(versions):
            await self._state.put(f"{ANCHORS}{version:010d}", RETIRED)

    def check_available(self, head: Head) -> None:
        """Refuse a head (ChainError) that names an object which is retired, or was never complete in storage."""
        for version in head.anchors:
            if version not in self.anchors:
                raise ChainError("the head would name an anchor that is not in storage", f"version {version}")
        if head.oldest_patch < self.first_patch:
            raise ChainError("the head would name a patch that is retired", f"version {head.oldest_patch}")


async def read_number(state: ObjectStore, path: str) -> int:
    """Return a number of the record; 0 if it was never written."""
    with suppress(NotFoundError):
        return int(await state.get(path, 32))
    return 0


async def read_manifests(state: ObjectStore) -> dict[int, Signed[Manifest]]:
    manifests: dict[int, Signed[Manifest]] = {}
    async for item in state.list(MANIFESTS):
        signed = open_announced(await state.get(item.path, limits.MAX_RECORD_BYTES * 2), Manifest)
        manifests[signed.record.version] = signed
    return manifests
