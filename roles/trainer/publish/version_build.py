"""Builds a version from what hosts have encoded of its tensors: weights and patch. No I/O; the publisher does that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from protocol import patch
from protocol.digest import Weights, outline, weights_digest
from protocol.encoding import content_digest
from protocol.objects import ObjectRef
from protocol.patch import EncodedTensor, Mode
from protocol.patch.container import TensorRow


@dataclass(frozen=True)
class VersionWeights:
    """The weights of a version, whose data are on the disk."""

    outline: Weights  # dtypes and shapes
    digest: bytes  # of all weights

    @classmethod
    def of(cls, tensors: Mapping[str, EncodedTensor]) -> Self:
        """Return the weights that encoded tensors lead to."""
        shapes = outline({name: (item.row.dtype, item.row.shape) for name, item in tensors.items()})
        return cls(shapes, weights_digest({name: item.after for name, item in tensors.items()}, shapes))


def unchanged(weights: Weights, digests: Mapping[str, bytes]) -> dict[str, EncodedTensor]:
    """Return tensors with their digests as if they were those of the version before."""
    rows = [TensorRow(name, item.dtype, tuple(item.shape), Mode.UNCHANGED, 0, 0, b"") for name, item in weights.items()]
    return {row.name: EncodedTensor(row, memoryview(b""), *[digests[row.name]] * 2) for row in rows}


def build_patch(tensors: Mapping[str, EncodedTensor], profile: str, base: bytes) -> bytes:
    """Return the patch from weights with a digest, of tensors that hosts have encoded and checked."""
    encoder = patch.PatchEncoder(profile)
    encoder.tensors.update(tensors)
    data = encoder.finish()
    # The frames were decoded by the hosts; what remains is what followers read first, the digests at both ends.
    patch.check_container(data, tensors, base, VersionWeights.of(tensors).digest)
    return data


def reference(data: bytes) -> ObjectRef:
    """Return the digest and size by which a manifest names an object."""
    return ObjectRef(digest=content_digest(data), size=len(data))
