"""Rebuilds the publisher's record from the chain that it has published (docs/guide/operate.md).

Storage shows what followers trust, so the record continues there: head, manifests, weights. Nothing is continued that
is behind what this state is known to have published, because the followers would see two histories.

And it takes back versions of one's own that the roots have taken back (`repair_rewind`). The trainer's head in storage
becomes that of the last valid version, under the revision with the rewind. Followers go back to it, the weights are
rebuilt from it, and training continues there.
"""

from collections.abc import Set
from contextlib import suppress
from typing import Final

from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier, is_taken_back
from protocol.digest import digest_weights
from protocol.errors import ProtocolError, error_context
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import Signed, sign
from protocol.limits import MAX_CHAIN
from roles.node.identity import Node
from roles.policy.follower import TRUST_PATH, Follower
from roles.ports import LineReporter, NotFoundError, RepairError, StoreError
from roles.records import fetch_envelope
from roles.trainer.publish.fencing import reaches_rewind, read_own_head
from roles.trainer.publish.head_writer import make_head
from roles.trainer.publish.history import (
    ANCHORS,
    EPOCH,
    FIRST_PATCH,
    MANIFESTS,
    RETIRED,
    REWIND,
    WRITER,
    History,
    read_manifests,
    read_number,
)
from roles.trainer.spool import (
    CHAIN,
    INBOX,
    OUTBOX,
    PUBLISHED_WEIGHTS,
    WEIGHTS,
    count_shards,
    list_snapshots,
    published_path,
    stored_versions,
    weights_folder,
)
from roles.trainer.tensor_shards import TensorSource, delete_below, put_shards, read_tensors, run_inline

LAST_CHANGES: Final = (MANIFESTS, REWIND)
"""What is written last after versions were taken back, when all that belongs to them is gone. As long as one of their
manifests is left, the publisher refuses to start and the next repair takes them back again. The note that the rewind is
obeyed would let the publisher go on with them.
"""


class ChainRepair:
    """The repair of one publisher's record, which has lost some objects, or is older than what it published.

    If `is_shared`, other hosts have files of the weights of this state, and its checkpoint is whole. Then what is not
    lost here counts as whole: the publisher finds what another host has lost.
    """

    def __init__(self, node: Node, lost_paths: Set[str], say: LineReporter, *, is_shared: bool = False) -> None:
        self._node = node
        self.is_shared = is_shared
        self._lost_paths = lost_paths
        self._say = say
        self._local: dict[int, Signed[Manifest]] = {}  # the manifests that the state still has

    async def is_needed(self) -> bool:
        """Return whether the record has lost something, or does not know the version that storage shows."""
        if any(path.startswith((CHAIN, OUTBOX, WEIGHTS)) for path in self._lost_paths):
            return True
        head = await self._read_head()
        if head is None:
            return False
        history = await History.open(self._node.state)
        # Storage may show one version more than is marked: the process was killed between head and mark, and its next
        # start goes on by itself (publisher.py). More than one, or a manifest that this state has not signed, means
        # that the state is a copy of an earlier time.
        version = history.published_version
        if head.version > version + 1 or not history.has_signed(head.version, head.digest(head.version)):
            return True
        files = await count_shards(self._node.state, published_path(version)) if version >= 0 else 0
        return version >= 0 and not await self._is_complete(version, files)

    async def run(self) -> None:
        """Rebuild chain and outbox in the node's state; RepairError if storage is behind it, or has another history."""
        # The node's state is a draft, which is written after the whole repair, so a crash before that changes nothing.
        # First, storage is compared with what this state has published. Storage decides, because followers trust what
        # it shows; but it must not be behind. To continue an older head would sign a second history of the versions in
        # between, and to begin anew where a version was published would sign a second manifest for version 0.
        state = self._node.state
        self._local = await read_manifests(state)
        # The names of lost objects count as well: a mark whose bytes are damaged still says of which version it was.
        names = [path for path in self._lost_paths if path.startswith(PUBLISHED_WEIGHTS)]
        names += [item.path async for item in self._node.state.list(PUBLISHED_WEIGHTS)]
        known_version = max((int(name.removeprefix(PUBLISHED_WEIGHTS)) for name in names), default=-1)
        head = await self._read_head()
        if head is None:
            if known_version >= 0:
                raise RepairError(
                    f"{CHAIN}: storage shows no head, but this node has published version {known_version}; restore the "
                    "storage first"
                )
            for prefix in (CHAIN, OUTBOX, WEIGHTS):
                await delete_below(self._node.state, prefix)
            self._say(f"{CHAIN}: nothing was published; it begins with the genesis weights")
            return
        if head.version < known_version:
            raise RepairError(
                f"{CHAIN}: storage shows version {head.version}, but this node has published version {known_version}; "
                "restore the storage first"
            )
        # A state that is behind is a copy of an earlier time, and the files of other hosts are not of that time.
        self.is_shared = self.is_shared and head.version <= known_version + 1
        # Then the three things that the record is about: manifests, which decide whether this is the node's own chain;
        # weights of the newest version, of which the next patch is made; snapshots that continue them. The record comes
        # last, because it says of all of them that they are there.
        manifests = await self._fetch_manifests(head)
        count = await self._rebuild_weights(head)
        await self._repair_outbox(head.version)
        await self._write(head, manifests, count)
        self._say(f"{CHAIN}: continues version {head.version}, the newest that storage shows")

    async def _read_head(self) -> Head | None:
        signed = await read_own_head(self._node)
        if signed is None:
            return None
        if signed.record.run != self._node.run_id:
            raise RepairError(f"{CHAIN}: storage shows the head of another run")
        return signed.record

    async def _fetch_manifests(self, head: Head) -> dict[int, tuple[Manifest, bytes]]:
        """Return the manifests that the head lists, verified, and their signed bytes, by version."""
        node, key = self._node, self._node.key.public
        # The record has to agree with what followers see, so the checks are theirs. This node renews the head itself
        # and was stopped, so an expired one counts.
        chain = ChainVerifier(node.run_id, node.run, revisions=node.revisions)
        chain.accept_head(await fetch_envelope(node, Head, paths.head(key)), node.clock.now(), allow_expired=True)
        manifests: dict[int, tuple[Manifest, bytes]] = {}
        for version, digest in chain.missing_manifests():
            # One key never signs two manifests for a version. If it did, somebody else has the key, and to go on would
            # put this node's signature on top of a chain that is not its own.
            local = self._local.get(version)
            if local is not None and local.digest != digest:
                raise RepairError(
                    f"{MANIFESTS}{version:010d}: storage shows another manifest than this state has signed; another "
                    "trainer uses this key: revoke it (docs/guide/operate.md)"
                )
            path = paths.manifest(key, version, digest)
            data = await fetch_envelope(node, Manifest, path)
            with error_context(path):
                manifests[version] = chain.accept_manifest(version, data), data
        return manifests

    async def _rebuild_weights(self, head: Head) -> int:
        """Make the newest version's weights whole, from the state or else storage; return how many files they have."""
        node, path = self._node, published_path(head.version)
        # Damaged files are absent from the draft, so files that are all there are intact.
        with suppress(NotFoundError):
            count = await count_shards(node.state, path)
            if await self._is_complete(head.version, count):
                return count
        folder, count = weights_folder(head.version), await rebuild_weights(node, head.version)
        for lost_path in sorted({path, *(name for name in self._lost_paths if name.startswith(folder))}):
            self._say(f"{lost_path}: rebuilt from storage")
        return count

    async def _is_complete(self, version: int, count: int) -> bool:
        """Return whether the state still has all files of a version's weights, or those that this host had."""
        folder = weights_folder(version)
        found = len([item async for item in self._node.state.list(folder)])
        is_lost = any(path.startswith(folder) for path in self._lost_paths)
        return found == count or (self.is_shared and found > 0 and not is_lost)

    async def _repair_outbox(self, published_version: int) -> None:
        """Keep the snapshots that follow the published version without a gap, and a signed manifest that fits."""
        # Each snapshot is trained from the one before. After a gap nothing that follows can be published as a patch, so
        # it is dropped, and trained again from the newest version that is left.
        state, expected = self._node.state, published_version + 1
        for name in await list_snapshots(state):
            is_complete = await self._is_complete(name.version, await count_shards(state, name.path))
            if name.version == expected and is_complete:
                expected += 1
                continue
            await state.delete(name.path)
            if name.version > published_version:
                cause = "the version before it is lost" if is_complete else "this host does not have all of its files"
                self._say(f"{name.path}: dropped, since {cause}; it is trained again")
        # The next version's manifest may be signed already. It is published with exactly the weights that it names, or
        # not at all: no head shows it yet, so without these weights it may be forgotten and another one signed.
        next_manifest = self._local.get(published_version + 1)
        if next_manifest is None:
            return
        for name in await list_snapshots(state):
            if name.version == published_version + 1:
                count = await count_shards(state, name.path)
                if self.is_shared:
                    return  # the publisher compares them, with those of other hosts
                weights = await read_tensors(state, weights_folder(name.version), count)
                if digest_weights(weights) == next_manifest.record.weights:
                    return
        del self._local[published_version + 1]
        self._say(f"{MANIFESTS}{published_version + 1:010d}: was signed and not shown to anybody; it is made again")

    async def _write(self, head: Head, manifests: dict[int, tuple[Manifest, bytes]], count: int) -> None:
        """Write the record anew; `count` is that of the files of the newest version's weights."""
        state = self._node.state
        # An epoch never goes back: followers refuse a lower one, and fencing stops the publisher that has it.
        epoch = max(head.epoch, await read_number(state, EPOCH))
        next_manifest = self._local.get(head.version + 1)
        objects: dict[str, bytes] = {
            EPOCH: str(epoch).encode(),
            WRITER: self._node.key.public,
            FIRST_PATCH: str(head.oldest_patch).encode(),
            REWIND: str(head.revision).encode(),  # the head was made when the rewinds up to then had been obeyed
            published_path(head.version): str(count).encode(),
        }
        # Versions whose files stay: the base of the next patch, and what the outbox still has to publish.
        versions = {head.version, *(name.version for name in await list_snapshots(state))}
        if next_manifest is not None:
            manifests[head.version + 1] = next_manifest.record, next_manifest.data
        for version, (manifest, data) in manifests.items():
            objects[f"{MANIFESTS}{version:010d}"] = data
            # The head names only anchors that are complete in storage. One that it does not name is either still to be
            # uploaded, if its files are here, or it may be deleted at any time and must never be named again.
            if version in head.anchors:
                objects[f"{ANCHORS}{version:010d}"] = b""
            elif manifest.anchor and await self._is_complete(version, len(manifest.anchor)):
                versions.add(version)  # its anchor is uploaded from there
            elif manifest.anchor:
                objects[f"{ANCHORS}{version:010d}"] = RETIRED
        # What is left of the old record would be read together with the new one, so it is removed.
        await delete_below(state, CHAIN, objects)
        for version in await stored_versions(state) - versions:
            await delete_below(state, weights_folder(version))
        for path, data in objects.items():
            await state.put(path, data)


async def rebuild_weights(node: Node, version: int) -> int:
    """Make the weights of the newest version whole from storage; return how many files they have. RepairError if
    storage shows another version as the newest, or does not lead there.
    """
    # This node fetches them as a new follower does, and each byte is checked against signed manifests. A follower takes
    # the newest chain of all trainers, so whose chain that is has to be looked at.
    follower = await Follower(node, allow_expired=True).open()
    try:
        await follower.refresh()
        if follower.chain.head is None or follower.chain.head.version != version:
            raise RepairError(f"{CHAIN}: storage shows the chain of another trainer as the newest")
        verified = await follower.rebuild(version)
    except (StoreError, ProtocolError) as error:
        raise RepairError(f"{CHAIN}: version {version} cannot be rebuilt from storage: {error}") from error
    await node.state.delete(TRUST_PATH)  # a publisher has none
    # The old files go first: these weights may be cut into fewer files, and a leftover would count as one of them.
    await delete_below(node.state, weights_folder(version))
    return await put_shards(node.state, weights_folder(version), TensorSource.of(verified.weights), run_inline)


async def repair_rewind(node: Node, say: LineReporter) -> bool:
    """Take back what this node has published after the last valid version; return whether there was anything. If its
    state does not go so far, only the head in storage is changed, and the chain is to be rebuilt from there.
    RepairError if the last valid version is none of this node's own, or cannot be rebuilt.
    """
    rewind, history = node.revisions.rewind, await History.open(node.state)
    if rewind is None:
        return False
    number, point = rewind
    if history.promised_version <= point.version:
        return await _shorten_head(node, history, number, point)
    # The record contains this rewind already: the later versions that it has were made after it.
    if number <= history.rewind:
        return False
    if not history.has_signed(point.version, point.digest):
        raise RepairError(
            f"{CHAIN}: revision {number} takes back the versions after a version {point.version} that this node has "
            "not published, so that it has nothing to continue; begin with an empty state"
        )
    if history.writer not in (None, node.key.public):
        raise RepairError(f"{CHAIN}: these versions were published under another key; repair with that key")
    # The state is a draft until the whole repair has succeeded; only the head is seen by others at once. After a crash
    # all of it is done again, also if the draft was written in part (LAST_CHANGES): the head in storage is then this
    # repair's own, and the next one has a higher epoch still. The weights are rebuilt after the head, by a follower,
    # which refuses the head that shows what is taken back.
    taken_back, head = history.promised_version, await read_own_head(node)
    await history.take_back(point.version)
    await history.record_rewind(number)
    await history.begin_epoch(max(history.epoch, head.record.epoch if head is not None else 0) + 1)
    # The last valid version is the newest now, so that followers, this repair included, can go back to it.
    expires_ms = int((node.clock.now() + node.run.head_ttl) * 1000)
    # MAX_CHAIN: a repair retires nothing, the publisher will by its own settings.
    keep, newest = (MAX_CHAIN, MAX_CHAIN), history.published_version
    new_head = make_head(history, newest, *keep, node.run_id, node.revisions.number, expires_ms)
    await node.store.put(paths.head(node.key.public), sign(new_head, node.key))
    for stored_version in await stored_versions(node.state):
        await delete_below(node.state, weights_folder(stored_version))
    count = await rebuild_weights(node, point.version)
    await node.state.put(published_path(point.version), str(count).encode())
    await _drop_later_work(node)
    span = f"{point.version + 1} to {taken_back}"
    say(f"{CHAIN}: versions {span} are taken back by revision {number}; {point.version} is the newest")
    return True


async def _drop_later_work(node: Node) -> None:
    """Drop snapshots of versions that are taken back, and groups that these have generated."""
    for prefix in (OUTBOX, INBOX):
        await delete_below(node.state, prefix)


async def _shorten_head(node: Node, history: History, number: int, point: ChainPoint) -> bool:
    """Make the head in storage end at the last valid version if it shows later ones, and this state does not go so far:
    it is that of an old backup, or is lost. The chain is rebuilt from storage then.
    """
    signed = await read_own_head(node)
    if signed is None or not is_taken_back(signed.record, node.revisions) or reaches_rewind(history, node.revisions):
        return False
    head = signed.record
    # This state lacks the manifests, so the head is cut short and not made anew: what remains must be a chain that can
    # be followed, with the last valid version, an anchor, and all patches from there.
    anchors = tuple(version for version in head.anchors if version <= point.version)
    is_in_head = head.base <= point.version and head.digest(point.version) == point.digest
    if not is_in_head or not anchors or head.oldest_patch > point.version + 1:
        raise RepairError(
            f"{CHAIN}: this state is older than version {point.version}, the last one that revision {number} leaves, "
            "and storage does not lead there; restore a newer backup"
        )
    # The higher epoch stops a publisher that still runs under this key (fencing.py).
    shortened = Head(
        run=head.run,
        epoch=head.epoch + 1,
        base=head.base,
        manifests=head.manifests[: point.version - head.base + 1],
        anchors=anchors,
        oldest_patch=head.oldest_patch,
        revision=node.revisions.number,
        expires_ms=int((node.clock.now() + node.run.head_ttl) * 1000),
    )
    await node.store.put(paths.head(node.key.public), sign(shortened, node.key))
    await _drop_later_work(node)
    return True
