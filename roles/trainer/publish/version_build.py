"""Builds a version from a snapshot: digests, patch, anchor shards, manifest. No I/O; the publisher does that."""

from dataclasses import dataclass

from protocol import patch
from protocol.chain import safetensors
from protocol.chain.manifest import Manifest, ObjectRef, PatchRef, tensor_table
from protocol.digest import Weights, content_digest, tensor_digest, weights_digest
from roles.policy.follower import VerifiedWeights


@dataclass(frozen=True)
class VersionObjects:
    """The objects of which a version consists.

    Attributes:
        verified: the weights with their digests.
        patch: from the previous version; None for a version with an anchor only.
        changed_elements: how many elements the patch changes.
        shards: of the anchor; empty for a version with a patch only.
    """

    verified: VerifiedWeights
    patch: bytes | None
    changed_elements: int
    shards: tuple[bytes, ...]


def digest_snapshot(version: int, weights: Weights, previous: VerifiedWeights | None) -> VerifiedWeights:
    """Compute the digests of a version's weights. Tensors equal to those of the previous version share their memory."""
    tensors = dict(weights)
    digests: dict[str, bytes] = {}
    for name, tensor in weights.items():
        digests[name] = tensor_digest(tensor)
        if previous is not None and digests[name] == previous.digests[name]:
            tensors[name] = previous.weights[name]
    return VerifiedWeights(version, tensors, digests, weights_digest(digests, tensors))


def encode_patch(
    verified: VerifiedWeights, previous: VerifiedWeights, profile: str, conditions: patch.LinkConditions
) -> patch.EncodedPatch:
    """Encode the patch from the previous version to this one."""
    return patch.encode_with_digests(
        previous.weights,
        verified.weights,
        profile=profile,
        conditions=conditions,
        base_digests=previous.digests,
        digests=verified.digests,
    )


def check_patch(data: bytes, verified: VerifiedWeights, previous: VerifiedWeights) -> int:
    """Apply a patch as every follower will, and return how many elements it changes.

    Raises:
        ProtocolError: it does not lead to the weights that it was made from: a fault of the codec, which must not
            reach followers.
    """
    patch.check_encoded(
        previous.weights, verified.weights, data, base_digests=previous.digests, digests=verified.digests
    )
    return patch.summary(data).changed


def make_shards(weights: Weights, shard_bytes: int) -> tuple[bytes, ...]:
    """Return the anchor of weights: safetensors files of at most about `shard_bytes` bytes each."""
    return tuple(
        safetensors.write({name: weights[name] for name in names}) for names in safetensors.shards(weights, shard_bytes)
    )


def reference(data: bytes) -> ObjectRef:
    """Return the digest and size by which a manifest names an object."""
    return ObjectRef(digest=content_digest(data), size=len(data))


@dataclass(frozen=True)
class PublicationMoment:
    """What a manifest says beside its objects: the run, the previous manifest's digest, and times."""

    run_id: bytes
    previous: bytes
    optimizer_step: int
    beacon_round: int
    first_window: int
    epoch: int


def make_manifest(objects: VersionObjects, moment: PublicationMoment) -> Manifest:
    """Return the unsigned manifest of a version."""
    ref = None
    if objects.patch is not None:
        ref = PatchRef(object=reference(objects.patch), changed=objects.changed_elements)
    return Manifest(
        run=moment.run_id,
        version=objects.verified.version,
        previous=moment.previous,
        weights=objects.verified.digest,
        tensors=tensor_table(objects.verified.weights),
        patch=ref,
        anchor=tuple(reference(shard) for shard in objects.shards),
        optimizer_step=moment.optimizer_step,
        beacon_round=moment.beacon_round,
        first_window=moment.first_window,
        epoch=moment.epoch,
    )
