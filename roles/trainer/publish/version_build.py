"""From a snapshot to a signed manifest: diff, encode, digest. Pure; the publisher does the I/O around it."""

from dataclasses import dataclass

from protocol import patch
from protocol.chain import safetensors
from protocol.chain.manifest import Manifest, ObjectRef, PatchRef, tensor_table
from protocol.digest import Weights, content_digest, tensor_digest, weights_digest
from roles.policy.follower import VerifiedWeights


@dataclass(frozen=True)
class VersionObjects:
    """What a version consists of: a patch (None: only an anchor), shards (empty: only a patch), and the verified
    weights.
    """

    held: VerifiedWeights
    patch: bytes | None
    changed: int
    shards: tuple[bytes, ...]


def hold(version: int, weights: Weights, before: VerifiedWeights | None) -> VerifiedWeights:
    """Weights with their digests; tensors equal to those of the version before keep object and digest."""
    tensors = dict(weights)
    digests: dict[str, bytes] = {}
    for name, tensor in weights.items():
        digests[name] = tensor_digest(tensor)
        if before is not None and digests[name] == before.digests[name]:
            tensors[name] = before.weights[name]
    return VerifiedWeights(version, tensors, digests, weights_digest(digests, tensors))


def encode_patch(
    held: VerifiedWeights, before: VerifiedWeights, profile: str, conditions: patch.LinkConditions
) -> patch.EncodedPatch:
    """The patch from one version to the next."""
    return patch.encode_with_digests(
        before.weights,
        held.weights,
        profile=profile,
        conditions=conditions,
        base_digests=before.digests,
        digests=held.digests,
    )


def check_patch(data: bytes, held: VerifiedWeights, before: VerifiedWeights) -> int:
    """Apply a patch as every follower will, and return how many elements it changes.

    Raises:
        ProtocolError: it does not lead to the weights that it was made from: a fault of the codec, which must not
            reach followers.
    """
    patch.check_encoded(before.weights, held.weights, data, base_digests=before.digests, digests=held.digests)
    return patch.summary(data).changed


def make_shards(weights: Weights, shard_bytes: int) -> tuple[bytes, ...]:
    """The anchor of weights: safetensors files of at most about `shard_bytes` each."""
    return tuple(
        safetensors.write({name: weights[name] for name in names}) for names in safetensors.shards(weights, shard_bytes)
    )


def reference(data: bytes) -> ObjectRef:
    """The digest and size that name an object."""
    return ObjectRef(digest=content_digest(data), size=len(data))


@dataclass(frozen=True)
class PublicationMoment:
    """When a version is made: run, link, and where it stands in time."""

    run_id: bytes
    previous: bytes
    optimizer_step: int
    beacon_round: int
    first_window: int
    epoch: int


def make_manifest(objects: VersionObjects, moment: PublicationMoment) -> Manifest:
    """The manifest of a version."""
    ref = None
    if objects.patch is not None:
        ref = PatchRef(object=reference(objects.patch), changed=objects.changed)
    return Manifest(
        run=moment.run_id,
        version=objects.held.version,
        previous=moment.previous,
        weights=objects.held.digest,
        tensors=tensor_table(objects.held.weights),
        patch=ref,
        anchor=tuple(reference(shard) for shard in objects.shards),
        optimizer_step=moment.optimizer_step,
        beacon_round=moment.beacon_round,
        first_window=moment.first_window,
        epoch=moment.epoch,
    )
