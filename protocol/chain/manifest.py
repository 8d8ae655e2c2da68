"""The records of the chain: a manifest for every version, and the head that points to the newest (docs/spec/chain.md).

This module checks each record by itself; protocol/chain/verifier.py checks it against the records before it.
"""

from itertools import pairwise
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from protocol import limits
from protocol.difficulty import DifficultyTable
from protocol.digest import Weights, dtypes, type_name
from protocol.encoding import OPTIONAL, Ascending, Record, Version, Window
from protocol.errors import ExpiredError, MalformedError
from protocol.identity.signing import Digest
from protocol.objects import ObjectRef
from protocol.window import Round

Epoch = Annotated[int, Field(ge=0, lt=1 << 53)]
TensorRow = tuple[
    Annotated[str, Field(max_length=limits.MAX_NAME_BYTES)],
    Annotated[str, Field(max_length=16)],
    Annotated[tuple[Annotated[int, Field(ge=0, le=limits.MAX_ELEMENTS)], ...], Field(max_length=limits.MAX_RANK)],
]


class PatchRef(Record):
    """A reference to the patch from the version before."""

    kind: ClassVar[str] = "patch"
    # the objects that are the patch's bytes, one after the other. A follower decodes each when it has arrived and has
    # its digest, while the next ones still arrive
    parts: Annotated[tuple[ObjectRef, ...], Field(min_length=1, max_length=limits.MAX_PATCH_PARTS)]
    changed: Annotated[int, Field(ge=0)]

    @property
    def size(self) -> int:
        """Bytes of the patch."""
        return sum(part.size for part in self.parts)


class Manifest(Record):
    """The description of a policy version (fields: docs/spec/chain.md)."""

    kind: ClassVar[str] = "manifest"
    run: Digest
    version: Version
    previous: Annotated[bytes, Field(max_length=32)]
    weights: Digest
    tensors: Annotated[tuple[TensorRow, ...], Field(min_length=1, max_length=limits.MAX_TENSORS)]
    patch: PatchRef | None
    anchor: Annotated[tuple[ObjectRef, ...], Field(max_length=limits.MAX_ANCHOR_SHARDS)]
    optimizer_step: Annotated[int, Field(ge=0, lt=1 << 53)]
    beacon_round: Round
    first_window: Window
    epoch: Epoch
    difficulty: DifficultyTable | None = OPTIONAL

    @model_validator(mode="after")
    def _reachable(self) -> "Manifest":
        if self.version == 0 and (self.previous or self.patch or not self.anchor):
            raise ValueError("version 0 has an anchor, no patch and nothing before it")
        if self.version > 0 and (len(self.previous) != 32 or not (self.patch or self.anchor)):
            raise ValueError("a version has a manifest before it, and a patch or an anchor")
        return self

    @model_validator(mode="after")
    def _table(self) -> "Manifest":
        if any(row[0] >= following[0] for row, following in pairwise(self.tensors)):
            raise ValueError("tensors do not ascend by name")
        for name, dtype, shape in self.tensors:
            if dtype not in dtypes or prod(shape) > limits.MAX_ELEMENTS or len(name.encode()) > limits.MAX_NAME_BYTES:
                raise ValueError("a tensor has a dtype, a shape or a name that weights may not have")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> "Manifest":
        if self.patch is not None and self.patch.size > 2 * self.weight_bytes + limits.MAX_PATCH_HEADER_BYTES:
            raise ValueError("the patch is larger than its tensors can need")
        headers = len(self.anchor) * limits.MAX_SAFETENSORS_HEADER_BYTES
        if sum(shard.size for shard in self.anchor) > self.weight_bytes + headers:
            raise ValueError("the anchor is larger than its tensors")
        return self

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(prod(shape) for _, _, shape in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Size of all tensors in bytes, which is that of a full checkpoint."""
        return sum(prod(shape) * dtypes[dtype].itemsize for _, dtype, shape in self.tensors)

    def check_table(self, weights: Weights) -> None:
        """Raise MalformedError unless weights have the names, dtypes and shapes of the manifest's table."""
        if tensor_table(weights) != self.tensors:
            raise MalformedError("the tensors differ from the manifest's table", f"version {self.version}")


def tensor_table(weights: Weights) -> tuple[TensorRow, ...]:
    """Return (name, dtype, shape) of every tensor, in order of name."""
    return tuple((name, type_name(weights[name].dtype), tuple(weights[name].shape)) for name in sorted(weights))


class Head(Record):
    """The signed pointer to the newest version (fields: docs/spec/chain.md)."""

    kind: ClassVar[str] = "head"
    max_bytes: ClassVar[int] = limits.MAX_HEAD_BYTES
    run: Digest
    epoch: Epoch
    base: Version
    manifests: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=limits.MAX_CHAIN)]
    anchors: Annotated[tuple[Version, ...], Field(min_length=1, max_length=limits.MAX_CHAIN), Ascending]
    oldest_patch: Version
    revision: Annotated[int, Field(ge=0, le=limits.MAX_REVISIONS)]
    expires_ms: Annotated[int, Field(ge=0, lt=1 << 53)]

    @model_validator(mode="after")
    def _consistent(self) -> "Head":
        if not self.base <= self.anchors[0] <= self.oldest_patch:
            raise ValueError("an anchor older than base, or an oldest patch that precedes the oldest anchor")
        if self.anchors[-1] > self.version or self.oldest_patch > self.version + 1:
            raise ValueError("an anchor or a patch newer than the newest version")
        return self

    @property
    def version(self) -> int:
        """The newest version."""
        return self.base + len(self.manifests) - 1

    def digest(self, version: int) -> bytes:
        """Return the digest of the manifest of a version, which lies between `base` and the newest."""
        return self.manifests[version - self.base]


def check_expiry(head: Head, now: float) -> None:
    """Raise ExpiredError for a head that has expired by now, in seconds since the Unix epoch."""
    if now * 1000.0 >= head.expires_ms:
        raise ExpiredError("has expired; nobody renews it, or storage hides the newer head", "head")
