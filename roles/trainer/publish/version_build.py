"""Builds a version from a snapshot: digests and patch. No I/O; the publisher does that.

The tensors come file by file, and only those of one file of the new version and of the one before are in memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from protocol import patch
from protocol.digest import Weights, outline, tensor_digest, weights_digest
from protocol.encoding import content_digest
from protocol.objects import ObjectRef
from protocol.patch import EncodedTensor, Mode
from protocol.patch.container import TensorRow


@dataclass(frozen=True)
class VersionWeights:
    """The weights of a version, whose data are on the disk."""

    version: int
    outline: Weights  # dtypes and shapes
    digests: Mapping[str, bytes]  # BLAKE3 of each tensor
    digest: bytes  # of all weights


class VersionBuild:
    """The build of one version from the files of its weights, one after the other, and of the patch from a previous
    one, "compact" or "fast"; without one it computes digests only. `threads` tensors are encoded at the same time.
    """

    def __init__(
        self, version: int, previous: VersionWeights | None = None, profile: str = "compact", threads: int = 1
    ) -> None:
        self._version = version
        self._previous = previous
        self._encoder = patch.PatchEncoder(profile, threads=threads) if previous is not None else None
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._digests: dict[str, bytes] = {}

    def add(self, new: Weights) -> None:
        """Add the tensors of the next file: compute their digests."""
        for name, tensor in new.items():
            self._shapes[name] = (tensor.dtype, tensor.shape)
            self._digests[name] = tensor_digest(tensor)

    def encode(self, new: Weights, old: Weights) -> None:
        """Encode the changes of tensors that were added, from those of the previous version with the same names."""
        # Both digests are known: the new ones from `add`, the old ones from the build of the version before.
        assert self._encoder is not None and self._previous is not None
        self._encoder.add(old, new, base_digests=self._previous.digests, digests=self._digests)

    def check(self, new: Weights, old: Weights) -> None:
        """Decode the changes of tensors that were encoded, as every follower will."""
        assert self._encoder is not None
        patch.check_frames(old, new, self._encoder.tensors)

    def tensors(self) -> dict[str, EncodedTensor]:
        """Return the tensors that were added, encoded; without a version before, as unchanged."""
        if self._encoder is not None:
            return self._encoder.tensors
        rows = [
            TensorRow(name, dtype, tuple(shape), Mode.UNCHANGED, 0, 0, b"")
            for name, (dtype, shape) in self._shapes.items()
        ]
        return {row.name: EncodedTensor(row, memoryview(b""), *[self._digests[row.name]] * 2) for row in rows}

    def merge(self, tensors: Mapping[str, EncodedTensor]) -> None:
        """Add tensors that another build of this version has encoded and checked."""
        self._shapes |= {name: (item.row.dtype, torch.Size(item.row.shape)) for name, item in tensors.items()}
        self._digests |= {name: item.after for name, item in tensors.items()}
        if self._encoder is not None:
            self._encoder.tensors.update(tensors)

    def weights(self) -> VersionWeights:
        """Return what is known of the weights after the last file."""
        shapes = outline(self._shapes)
        return VersionWeights(self._version, shapes, self._digests, weights_digest(self._digests, shapes))

    def patch(self) -> tuple[bytes, int]:
        """Return the patch, and how many elements it changes."""
        assert self._encoder is not None and self._previous is not None
        # The frames were decoded by `check`; what remains is what followers read first, the digests at both ends.
        data, tensors = self._encoder.finish(), self._encoder.tensors
        patch.check_container(data, tensors, self._previous.digest, self.weights().digest)
        return data, sum(tensor.row.changed for tensor in tensors.values())


def reference(data: bytes) -> ObjectRef:
    """Return the digest and size by which a manifest names an object."""
    return ObjectRef(digest=content_digest(data), size=len(data))
