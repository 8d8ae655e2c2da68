"""Weights whose digest a trainer has signed, built from the objects of an anchor or of a patch as they arrive.

A build takes the objects one after the other; whoever fetches them has compared their digests. Its weights become a
version only when their digest is the one in the manifest, and the version before is untouched until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from protocol.chain import safetensors
from protocol.chain.manifest import Manifest
from protocol.digest import Weights, tensor_digest, weights_digest
from protocol.errors import ChainError, MalformedError
from protocol.objects import ObjectRef
from protocol.patch import NewTensors, StreamingApply, copy_bits
from protocol.quantization import check_scales

_MAX_STEPS: Final = 8  # patches that are kept with the weights that they led to,
_STEP_SHARE: Final = 4  # together at most the weights' bytes divided by this


@dataclass(frozen=True)
class PatchStep:
    """A patch that was applied to the weights of digest `base`; the manifest is that of the version after it."""

    base: bytes
    manifest: Manifest
    patch: bytes


@dataclass(frozen=True)
class VerifiedWeights:
    """The weights of one version, whose digest is the one in its manifest."""

    version: int
    weights: Weights
    digests: dict[str, bytes]  # BLAKE3 of each tensor
    digest: bytes  # of all weights
    # the last patches that led here, in order, for an engine that serves a version before one of them
    steps: tuple[PatchStep, ...] = ()

    def steps_from(self, digest: bytes | None) -> tuple[PatchStep, ...]:
        """Return the patches that lead here from weights with a digest; none if they are not known."""
        places = [place for place, step in enumerate(self.steps) if step.base == digest]
        return self.steps[places[-1] :] if places else ()


class AnchorBuild:
    """Builds a version from the shards of its anchor."""

    def __init__(self, manifest: Manifest, new_tensors: NewTensors | None = None) -> None:
        self._manifest = manifest
        self._new_tensors = new_tensors
        self._tensors: dict[str, torch.Tensor] = {}
        self._digests: dict[str, bytes] = {}

    def add(self, data: bytes) -> None:
        shard = safetensors.read(data)
        if not self._tensors.keys().isdisjoint(shard):
            raise MalformedError("a tensor in two shards of its anchor", f"version {self._manifest.version}")
        self._digests |= {name: tensor_digest(tensor) for name, tensor in shard.items()}
        if self._new_tensors is not None:
            places = self._new_tensors(shard)
            shard = {name: copy_bits(tensor, places[name]) for name, tensor in shard.items()}
        self._tensors |= shard

    def finish(self) -> VerifiedWeights:
        self._manifest.check_table(self._tensors)
        return _verify(self._manifest, self._tensors, self._digests)


class PatchBuild:
    """Builds the version after `base` from the parts of its patch. In memory both versions share the tensors that do
    not change; `new_tensors` may say that they lie elsewhere.
    """

    def __init__(
        self, base: VerifiedWeights, manifest: Manifest, threads: int = 1, new_tensors: NewTensors | None = None
    ) -> None:
        self._base = base
        self._manifest = manifest
        self._application = StreamingApply(base.weights, digests=base.digests, threads=threads, new_tensors=new_tensors)
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._application.feed(data)
        self._parts.append(data)

    def finish(self) -> VerifiedWeights:
        result = self._application.finish()
        weights = _verify(self._manifest, result.weights, result.digests)
        step = PatchStep(self._base.digest, self._manifest, b"".join(self._parts))
        steps = (*self._base.steps[1 - _MAX_STEPS :], step)
        most = sum(tensor.nbytes for tensor in weights.weights.values()) // _STEP_SHARE
        while steps and sum(len(step.patch) for step in steps) > most:
            steps = steps[1:]
        return replace(weights, steps=steps)


WeightsBuild = AnchorBuild | PatchBuild


@dataclass(frozen=True)
class VersionObject:
    """One of the objects of which a version is built: a shard of its anchor, or a part of its patch."""

    manifest: Manifest
    ref: ObjectRef  # by which the manifest names the object
    from_anchor: bool
    is_first: bool
    is_last: bool  # whether the version is complete with it


def objects_of(manifest: Manifest, from_anchor: bool) -> Sequence[ObjectRef]:
    """Return the shards of a version's anchor, or the parts of its patch."""
    if from_anchor:
        return manifest.anchor
    return manifest.patch.parts if manifest.patch is not None else ()


def _verify(manifest: Manifest, weights: Weights, digests: dict[str, bytes]) -> VerifiedWeights:
    digest = weights_digest(digests, weights)
    if digest != manifest.weights:
        raise ChainError("the rebuilt weights are not those that the trainer signed", f"version {manifest.version}")
    check_scales(weights, f"version {manifest.version}")
    return VerifiedWeights(manifest.version, weights, digests, digest)
