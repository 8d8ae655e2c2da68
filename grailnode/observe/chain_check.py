"""`grailnode verify`: follow a published chain from its oldest anchor to the head and check every step."""

from collections.abc import AsyncIterator, Sequence

from grailnode import UserError
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.environments.record import SHARES
from protocol.errors import ChainError, ExpiredError, error_context
from roles.node.identity import Node
from roles.policy.difficulty_tables import table_fault
from roles.policy.verified_weights import AnchorBuild, PatchBuild, VerifiedWeights, WeightsBuild, objects_of
from roles.ports import LineReporter, NotFoundError
from roles.records import fetch_envelope, fetch_object


async def verify_chain(node: Node, say: LineReporter) -> VerifiedWeights:
    """Check every manifest, anchor and patch that a run's head lists, and return the newest version's weights."""
    newest: VerifiedWeights | None = None
    async for weights in follow_chain(node, say):
        newest = weights
    assert newest is not None  # or follow_chain would have raised
    return newest


async def fetch_first_head(node: Node) -> bytes:
    """Fetch the bytes of the head; UserError, for a command that can do nothing without, if there is none."""
    path = paths.head(node.authority.trainers[0])
    try:
        return await fetch_envelope(node, Head, path)
    except NotFoundError as error:
        raise UserError(f"{path}: this run has published no version yet; start its trainer, or wait") from error


async def read_chain(node: Node, chain: ChainVerifier, head: bytes) -> ExpiredError | None:
    """Accept the bytes of a head, and fetch the manifests that it lists; return whether it has expired, and when."""
    trainer, expired = node.authority.trainers[0], None
    with error_context(paths.head(trainer)):
        try:
            chain.accept_head(head, node.clock.now())
        except ExpiredError as error:
            expired = error
            chain.accept_head(head, node.clock.now(), allow_expired=True)
    for version, digest in chain.missing_manifests():
        path = paths.manifest(trainer, version, digest)
        data = await fetch_envelope(node, Manifest, path)
        with error_context(path):
            chain.accept_manifest(version, data)
    return expired


async def follow_chain(node: Node, say: LineReporter) -> AsyncIterator[VerifiedWeights]:
    """Yield each version to which the listed anchors and patches lead, oldest first, checked as by `verify_chain`."""
    trainer = node.authority.trainers[0]
    chain = ChainVerifier(node.run_id, node.run, revisions=node.revisions)
    if expired := await read_chain(node, chain, await fetch_first_head(node)):
        say(f"note: {expired}, as after the end of a run")
    head = chain.head
    assert head is not None  # or it would not have been accepted
    say(f"manifests {head.base} to {head.version}: signed, linked, complete")
    await _check_tables(node, list(chain.manifests()), say)
    weights: VerifiedWeights | None = None
    for manifest in chain.manifests():
        if manifest.version in head.anchors:
            anchor = await _build(node, AnchorBuild(manifest), trainer, manifest, from_anchor=True)
            size = sum(ref.size for ref in manifest.anchor)
            say(f"version {manifest.version}: anchor of {size} bytes is {anchor.digest.hex()[:16]}")
            patch_follows = (
                weights is not None and weights.version == manifest.version - 1 and manifest.patch is not None
            )
            if manifest.version >= head.oldest_patch - 1 and not patch_follows:
                weights = anchor  # the patches begin here, or no listed patch leads to this version
        if weights is not None and weights.version == manifest.version - 1 and manifest.patch is not None:
            weights = await _build(node, PatchBuild(weights, manifest), trainer, manifest, from_anchor=False)
            size, digest_text = manifest.patch.size, weights.digest.hex()[:16]
            say(f"version {weights.version}: patch of {size} bytes leads to {digest_text}")
        if weights is not None and weights.version == manifest.version:
            yield weights
    if weights is None or weights.version != head.version:
        raise ChainError("no listed anchor and patches lead to the newest version", f"version {head.version}")


async def _check_tables(node: Node, manifests: Sequence[Manifest], say: LineReporter) -> None:
    """Raise ChainError for the first version whose difficulty table does not follow from the summaries it names."""
    for manifest in manifests if node.run.difficulty is not None else ():
        place = f"version {manifest.version}"
        try:
            fault = await table_fault(node, manifest.difficulty)
        except NotFoundError as error:
            fault = str(error)  # summaries never expire
        if fault:
            raise ChainError(fault, place)
    newest = manifests[-1].difficulty
    if node.run.difficulty is not None and newest is not None:
        pairs = zip(node.run.difficulty.strata, newest.shares, strict=True)
        shares = ", ".join(f"{stratum.name or 'other'} {share / SHARES:.1%}" for stratum, share in pairs)
        say(f"difficulty of version {manifests[-1].version}, by summaries of window {newest.window}: {shares}")


async def _build(
    node: Node, build: WeightsBuild, trainer: bytes, manifest: Manifest, *, from_anchor: bool
) -> VerifiedWeights:
    path_of = paths.anchor if from_anchor else paths.patch
    for ref in objects_of(manifest, from_anchor):
        build.add(await fetch_object(node, path_of(trainer, ref.digest), ref))
    return build.finish()
