"""Weights to a patch (docs/spec/patch.md)."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import torch
from blake3 import blake3

from protocol.digest import Weights, raw_bytes, type_name, weights_digest
from protocol.patch.container import CHECK_BYTES, Mode, Table, TensorRow, check_length, read_header, write_container
from protocol.patch.frames import encode_frame
from protocol.patch.profiles import LinkConditions, ProfileChoice, pick_profile
from protocol.patch.sparse import Scratch

Digests = Mapping[str, bytes]
"""The BLAKE3 of each tensor's bytes, by name."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A patch, the digests of the new weights' tensors that were computed on the way, and which profile was taken, and
    why.
    """

    patch: bytes
    digests: dict[str, bytes]
    choice: ProfileChoice


@dataclass(frozen=True, slots=True)
class PatchSummary:
    """What the table of a patch says; nothing is decoded.

    Attributes:
        base: the weights digest that the patch applies to.
        result: the weights digest that it leads to.
        nbytes: bytes of the whole patch.
        weight_bytes: bytes of the full weights.
    """

    profile: str
    base: bytes
    result: bytes
    rows: Table
    changed: int
    elements: int
    nbytes: int
    weight_bytes: int


def digest_tensor(tensor: torch.Tensor) -> bytes:
    """BLAKE3 of the tensor's raw bytes on the calling thread: 32 bytes."""
    return blake3(raw_bytes(tensor)).digest()


def check_same_tensors(old: Weights, new: Weights) -> None:
    """Old and new weights must be the same tensors.

    Raises:
        ValueError: names, dtypes or shapes differ.
    """
    if old.keys() != new.keys():
        raise ValueError("old and new weights must have the same tensors")
    for name, before in old.items():
        type_name(before.dtype)
        after = new[name]
        if before.dtype != after.dtype or before.shape != after.shape:
            raise ValueError(f"{name}: old and new weights must have the same dtypes and shapes")


def encode_with_digests(
    old: Weights,
    new: Weights,
    *,
    profile: str = "compact",
    conditions: LinkConditions | None = None,
    base_digests: Digests | None = None,
    digests: Digests | None = None,
    threads: int = 1,
) -> Encoded:
    """Like `encode`; takes the tensors' digests where they are known, gives the new ones back.

    Args:
        base_digests: BLAKE3 of each old tensor; without it, the old tensors are read once more.
        digests: BLAKE3 of each new tensor, which the caller computed from these very tensors; without it, the changed
            ones are read once more.
        threads: tensors encoded at the same time, each with a Scratch of its own.

    Raises:
        ValueError: as `encode`, or a digest that contradicts whether its tensor changed.
    """
    check_same_tensors(old, new)
    choice = pick_profile(profile, sum(tensor.nbytes for tensor in new.values()), conditions)
    names = sorted(new)
    scratch = local()

    def one(name: str) -> tuple[TensorRow, memoryview, bytes, bytes]:
        if not hasattr(scratch, "workspace"):
            scratch.workspace = Scratch()
        mode, changed, frame = encode_frame(old[name], new[name], choice.profile, scratch.workspace)
        before = base_digests[name] if base_digests is not None else digest_tensor(old[name])
        unchanged = mode == Mode.UNCHANGED
        after = digests[name] if digests is not None else before if unchanged else digest_tensor(new[name])
        if (after == before) != unchanged:
            raise ValueError(f"{name}: a digest of another tensor")
        check = b"" if unchanged else after[:CHECK_BYTES]
        row = TensorRow(name, new[name].dtype, tuple(new[name].shape), mode, changed, len(frame), check)
        return row, frame, before, after

    if threads == 1:
        encoded = [one(name) for name in names]
    else:
        with ThreadPoolExecutor(threads) as pool:
            encoded = list(pool.map(one, names))
    result = {row.name: after for row, _, _, after in encoded}
    base = weights_digest({row.name: before for row, _, before, _ in encoded}, old)
    rows, frames = [row for row, *_ in encoded], [frame for _, frame, *_ in encoded]
    patch = write_container(choice.profile, base, weights_digest(result, new), rows, frames)
    return Encoded(patch, result, choice)


def encode(old: Weights, new: Weights, *, profile: str = "compact", conditions: LinkConditions | None = None) -> bytes:
    """The patch from `old` to `new`, bit for bit.

    Args:
        old: the last published version.
        new: the version to publish: the same tensors.
        profile: "compact", "fast", or "auto": whichever of the two brings these weights to a follower first.
        conditions: what "auto" goes by; `encode_with_digests` says what it picked and why.

    Raises:
        ValueError: no such profile, "auto" without conditions, or
            tensors that differ in name, dtype or shape, are not contiguous or not on the CPU.
        MalformedError: a dtype that does not travel.
    """
    return encode_with_digests(old, new, profile=profile, conditions=conditions).patch


def summary(patch: bytes) -> PatchSummary:
    """What the table says, without decoding a frame.

    Raises:
        MalformedError, LimitError, PatchError: a table that is broken or contradicts itself.
    """
    header = read_header(patch)
    check_length(patch, header)
    changed = elements = weight_bytes = 0
    for row in header.rows:
        changed, elements, weight_bytes = changed + row.changed, elements + row.elements, weight_bytes + row.nbytes
    return PatchSummary(
        header.profile, header.base, header.result, header.rows, changed, elements, len(patch), weight_bytes
    )
