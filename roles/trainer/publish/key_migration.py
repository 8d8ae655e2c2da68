"""Moves a trainer's chain from its old key's space to that of its new key (docs/adr/0220).

The data are copied first, then the manifests are signed again. A manifest is named by the digest of its body, so
followers see one history. After a crash all of it is done again; the record of the chain's writer is changed last.
"""

from typing import Final

import trio

from protocol import paths
from protocol.chain.manifest import Head
from protocol.errors import ChainError, MalformedError
from protocol.identity.signing import sign
from protocol.objects import ObjectRef
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_object
from roles.trainer.publish.history import History

_RETRY_SECONDS: Final = 1.0


async def migrate(node: Node, history: History, old_key: bytes, head: Head) -> None:
    """Copy what a head names from the old key's space to this node's, and sign the manifests again."""
    new_key = node.key.public
    await history.retire(head)  # what the head leaves out is not copied, so the new head must never name it
    node.telemetry.event("key-migration", old=old_key.hex(), versions=len(history.manifests))
    # Patches and anchors first, so that no manifest below the new key names what is not there yet. A version that was
    # signed and not published is published next, without another upload of its anchor if that was complete.
    for version, signed in sorted(history.manifests.items()):
        manifest = signed.record
        if manifest.patch is not None and version >= head.oldest_patch:
            for ref in manifest.patch.parts:
                await _copy(node, paths.patch(old_key, ref.digest), paths.patch(new_key, ref.digest), ref)
        is_published_next = version > history.published_version and version in history.anchors
        for ref in manifest.anchor if version in head.anchors or is_published_next else ():
            await _copy(node, paths.anchor(old_key, ref.digest), paths.anchor(new_key, ref.digest), ref)
    # The bodies, and so the digests, paths and links, stay the same; only the signatures are new.
    for version, signed in sorted(history.manifests.items()):
        new_manifest = await history.record_manifest(sign(signed.record, node.key))
        if version <= history.published_version:
            await node.publish(paths.manifest(new_key, version, new_manifest.digest), new_manifest.data)
    # The old head was not touched, so until the new key's first head followers go on with the old key's chain.
    await history.set_writer(new_key)


async def _copy(node: Node, source: str, target: str, ref: ObjectRef) -> None:
    while True:
        try:
            data = await fetch_object(node, source, ref)
            break
        except NotFoundError:
            raise ChainError(
                "is gone; the old key's space must stay readable until its chain has moved", source
            ) from None
        except MalformedError as error:
            raise ChainError(f"{error.what}; the old key's space was tampered with", source) from error
        except StoreError as error:
            node.telemetry.event("get-failed", path=source, error=str(error))
            await trio.sleep(_RETRY_SECONDS)
    await node.publish(target, data)
