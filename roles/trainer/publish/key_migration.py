"""A trainer with a new key takes along what it published under the old one (docs/adr/0221).

Data first, then the manifests, signed again: their names are digests of what they say, so followers see one history.
Everything can be done again after a crash; the note of who wrote the chain comes last.
"""

from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import Head, ObjectRef
from protocol.digest import content_digest
from protocol.errors import ChainError
from protocol.identity.signing import sign
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.trainer.publish.history import History

_RETRY_SECONDS: Final = 1.0


async def move_in(node: Node, history: History, old: bytes, kept: Head) -> None:
    """Copy what a head keeps from the old key's space into this node's, and sign the manifests again.

    Raises:
        ChainError: the old space does not hold an object any more, or other bytes.
        StoreError: this node's own state cannot be written.
    """
    new = node.key.public
    await history.give_up(kept)  # what is not copied is not there: the new head must never name it
    node.telemetry.event("moving-in", old=old.hex(), versions=len(history.manifests))
    for version, signed in sorted(history.manifests.items()):
        manifest = signed.record
        if manifest.patch is not None and version >= kept.oldest_patch:
            ref = manifest.patch.object
            await _copy(node, paths.patch(old, ref.digest), paths.patch(new, ref.digest), ref)
        shown_next = version > history.published and version in history.anchors
        for ref in manifest.anchor if version in kept.anchors or shown_next else ():
            await _copy(node, paths.anchor(old, ref.digest), paths.anchor(new, ref.digest), ref)
    for version, signed in sorted(history.manifests.items()):
        again = await history.promise(sign(signed.record, node.key))
        if version <= history.published:
            await node.publish(paths.manifest(new, version, again.digest), again.data)
    await history.set_writer(new)


async def _copy(node: Node, source: str, target: str, ref: ObjectRef) -> None:
    while True:
        try:
            data = await node.store.get(source, ref.size)
            break
        except NotFoundError:
            raise ChainError(
                "is gone; the old key's space must stay readable until its chain has moved", source
            ) from None
        except StoreError as error:
            node.telemetry.event("get-failed", path=source, error=str(error))
            await trio.sleep(_RETRY_SECONDS)
    if content_digest(data) != ref.digest:
        raise ChainError("not the bytes that the manifest names; the old key's space was tampered with", source)
    await node.publish(target, data)
