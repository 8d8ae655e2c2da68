"""Takes back versions of one's own that the roots have taken back (docs/guide/operate.md).

The trainer's head in storage becomes that of the last valid version, under the revision with the rewind. Followers go
back to it, the weights are rebuilt from it, and training continues there.
"""

from typing import Final

from protocol import paths
from protocol.chain.manifest import Head
from protocol.chain.verifier import is_taken_back
from protocol.identity.authority import ChainPoint
from protocol.identity.signing import sign
from protocol.limits import MAX_CHAIN
from roles.node.identity import Node
from roles.ports import LineReporter, RepairError
from roles.trainer.publish.chain_repair import rebuild_weights
from roles.trainer.publish.fencing import reaches_rewind, read_own_head
from roles.trainer.publish.head_writer import make_head
from roles.trainer.publish.history import MANIFESTS, REWIND, History
from roles.trainer.spool import CHAIN, INBOX, OUTBOX, published_path, stored_versions, weights_folder
from roles.trainer.tensor_shards import delete_below

LAST_CHANGES: Final = (MANIFESTS, REWIND)
"""What is written last after versions were taken back, when all that belongs to them is gone. As long as one of their
manifests is left, the publisher refuses to start and the next repair takes them back again. The note that the rewind is
obeyed would let the publisher go on with them.
"""


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
