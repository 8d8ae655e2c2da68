"""`grailnode verify`: follow a published chain from its oldest anchor to the head and believe nothing."""

from collections.abc import AsyncIterator, Callable

from protocol import limits, paths
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.digest import content_digest
from protocol.errors import ChainError, ExpiredError, found_in
from roles.node.identity import Node
from roles.policy.follower import VerifiedWeights, apply_patch, load_anchor
from roles.ports import ObjectStore


async def verify_chain(node: Node, say: Callable[[str], None]) -> VerifiedWeights:
    """Check every kept manifest, anchor and patch of a run.

    Args:
        say: told of progress, one line each.

    Returns:
        The newest version's weights.

    Raises:
        ProtocolError: the first lie.
        StoreError: an object that the head promises is not to be had.
    """
    newest: VerifiedWeights | None = None
    async for held in follow_chain(node, say):
        newest = held
    assert newest is not None  # or follow_chain would have raised
    return newest


async def follow_chain(node: Node, say: Callable[[str], None]) -> AsyncIterator[VerifiedWeights]:
    """Every version that the kept anchors and patches lead to, oldest first; checks and raises as `verify_chain`."""
    trainer = node.authority.trainers[0]
    chain = ChainVerifier(node.run_id, node.run, revisions=node.revisions)
    data = await node.store.get(paths.head(trainer), limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
    with found_in(paths.head(trainer)):
        try:
            head = chain.accept_head(data, node.clock.now())
        except ExpiredError as error:
            say(f"note: {error}, as after the end of a run")
            head = chain.accept_head(data, node.clock.now(), even_expired=True)
    for version, digest in chain.missing():
        path = paths.manifest(trainer, version, digest)
        data = await node.store.get(path, limits.MAX_RECORD_BYTES * 2)
        with found_in(path):
            chain.accept_manifest(version, data)
    say(f"manifests {head.base} to {head.version}: signed, linked, complete")
    held: VerifiedWeights | None = None
    for manifest in chain.manifests():
        if manifest.version in head.anchors:
            files = [
                await _object(node.store, paths.anchor(trainer, r.digest), r.digest, r.size) for r in manifest.anchor
            ]
            anchored = load_anchor(manifest, files)
            say(f"version {manifest.version}: anchor of {sum(map(len, files))} bytes is {anchored.digest.hex()[:16]}")
            led_to = held is not None and held.version == manifest.version - 1 and manifest.patch is not None
            if manifest.version >= head.oldest_patch - 1 and not led_to:
                held = anchored  # the first that the patches go on from, or one that no kept patch leads to
        if held is not None and held.version == manifest.version - 1 and manifest.patch is not None:
            held = await _patched(node, trainer, held, manifest)
            say(
                f"version {held.version}: patch of {manifest.patch.object.size} bytes leads to {held.digest.hex()[:16]}"
            )
        if held is not None and held.version == manifest.version:
            yield held
    if held is None or held.version != head.version:
        raise ChainError("no way from a kept anchor to the newest version", f"version {head.version}")


async def _patched(node: Node, trainer: bytes, held: VerifiedWeights, manifest: Manifest) -> VerifiedWeights:
    assert manifest.patch is not None
    ref = manifest.patch.object
    return apply_patch(
        held, manifest, await _object(node.store, paths.patch(trainer, ref.digest), ref.digest, ref.size)
    )


async def _object(store: ObjectStore, path: str, digest: bytes, size: int) -> bytes:
    data = await store.get(path, size)
    if content_digest(data) != digest:
        raise ChainError("not the bytes that the manifest names", path)
    return data
