"""Weights to patch and back (docs/spec/patch.md).

Order of checks when a patch is applied: the table against the caps, the table against the tensors at hand (names, dtypes,
shapes), each frame as it is decoded, the digest of each changed tensor, the digest of the whole. The digest of the result
covers every element, changed or not, so a wrong base cannot pass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from protocol.digest import Weights, tensor_digest, type_name, weights_digest
from protocol.errors import PatchError, ProtocolError
from protocol.patch.container import CHECK_BYTES, Header, Mode, Row, read_header, split_frames, write_container
from protocol.patch.dense import decode_dense, encode_dense
from protocol.patch.values import Bits, bits_of, layout_of

Digests = Mapping[str, bytes]
"""The BLAKE3 of each tensor's bytes, by name."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A patch, and the digests of the new weights' tensors that were computed on the way."""

    patch: bytes
    digests: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Applied:
    """The new weights, and the digests of their tensors that were computed on the way."""

    weights: dict[str, torch.Tensor]
    digests: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class PatchSummary:
    """What the table of a patch says; nothing is decoded.

    Attributes:
        nbytes: bytes of the whole patch.
        weight_bytes: bytes of the full weights.
    """

    profile: str
    base: bytes
    result: bytes
    rows: tuple[Row, ...]
    changed: int
    elements: int
    nbytes: int
    weight_bytes: int


def _check_same_tensors(old: Weights, new: Weights) -> None:
    if old.keys() != new.keys():
        raise ValueError("old and new weights must have the same tensors")
    for name, before in old.items():
        type_name(before.dtype)
        after = new[name]
        if before.dtype != after.dtype or before.shape != after.shape:
            raise ValueError(f"{name}: old and new weights must have the same dtypes and shapes")


def _encode_tensor(name: str, old: torch.Tensor, new: torch.Tensor, digest: bytes) -> tuple[Row, bytes]:
    before, after = bits_of(old), bits_of(new)
    changed = int((before != after).sum())
    if changed == 0:
        return Row(name, new.dtype, tuple(new.shape), Mode.UNCHANGED, 0, 0, b""), b""
    frames = {mode: encode_dense(before, after, layout_of(old.dtype), mode) for mode in (Mode.STEP_PLANES, Mode.STORED)}
    mode = min(frames, key=lambda mode: len(frames[mode]))
    row = Row(name, new.dtype, tuple(new.shape), mode, changed, len(frames[mode]), digest[:CHECK_BYTES])
    return row, frames[mode]


def encode_with_digests(
    old: Weights, new: Weights, *, profile: str = "compact", base_digests: Digests | None = None
) -> Encoded:
    """Like `encode`; takes the old tensors' digests where they are known, gives the new ones back."""
    _check_same_tensors(old, new)
    if base_digests is None:
        base_digests = {name: tensor_digest(tensor) for name, tensor in old.items()}
    digests = {name: tensor_digest(tensor) for name, tensor in new.items()}
    encoded = [_encode_tensor(name, old[name], new[name], digests[name]) for name in sorted(new)]
    patch = write_container(
        profile,
        weights_digest(base_digests, old),
        weights_digest(digests, new),
        [row for row, _ in encoded],
        [frame for _, frame in encoded],
    )
    return Encoded(patch, digests)


def encode(old: Weights, new: Weights, *, profile: str = "compact") -> bytes:
    """The patch from `old` to `new`, bit for bit.

    Args:
        old: the last published version.
        new: the version to publish: the same tensors.
        profile: "compact" or "fast".

    Raises:
        ValueError: tensors that differ in name, dtype or shape, are not contiguous or not on the CPU.
    """
    return encode_with_digests(old, new, profile=profile).patch


def _check_fit(weights: Weights, header: Header) -> None:
    if len(weights) != len(header.rows):
        raise PatchError(f"a patch of {len(header.rows)} tensors for weights of {len(weights)}")
    for row in header.rows:
        tensor = weights.get(row.name)
        if tensor is None:
            raise PatchError("a tensor that the weights do not have", row.name)
        if tensor.dtype != row.dtype or tuple(tensor.shape) != row.shape:
            have = f"{tensor.dtype}{tuple(tensor.shape)}"
            raise PatchError(f"{row.dtype}{row.shape} where the weights have {have}", row.name)


def _decode_tensor(old: Bits, row: Row, frame: memoryview) -> Bits:
    try:
        new = decode_dense(old, bytes(frame), layout_of(row.dtype), row.mode)
    except ProtocolError as error:
        raise type(error)(error.what, row.name) from error
    return new


def _decoded(weights: Weights, patch: bytes, header: Header) -> Iterator[tuple[Row, torch.Tensor]]:
    """Each changed tensor, checked against its row."""
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        if row.mode == Mode.UNCHANGED:
            continue
        old = weights[row.name]
        bits = _decode_tensor(bits_of(old), row, frame)
        tensor = torch.from_numpy(bits.view("u1")).view(old.dtype).reshape(old.shape)
        yield row, tensor


def apply_with_digests(weights: Weights, patch: bytes, digests: Digests | None = None) -> Applied:
    """Like `apply`; takes the tensors' digests where they are known, gives the new ones back."""
    header = read_header(patch)
    _check_fit(weights, header)
    if digests is not None and weights_digest(digests, weights) != header.base:
        raise PatchError("made for other weights than these")
    result = dict(weights)
    after: dict[str, bytes] = {}
    for row, tensor in _decoded(weights, patch, header):
        result[row.name] = tensor
        after[row.name] = tensor_digest(tensor)
        if after[row.name][:CHECK_BYTES] != row.check:
            raise PatchError("the patch does not lead to the tensor that it promises: a wrong base", row.name)
    for name, tensor in weights.items():
        if name not in after:
            after[name] = digests[name] if digests is not None else tensor_digest(tensor)
    if weights_digest(after, result) != header.result:
        raise PatchError("the patch does not lead to the weights that it promises: a wrong base")
    return Applied(result, after)


def apply(weights: Weights, patch: bytes) -> dict[str, torch.Tensor]:
    """The weights that the patch leads to. Unchanged tensors are shared with `weights`, changed ones are new.

    Raises:
        MalformedError, LimitError: bytes that are not a patch, or larger than any may be.
        PatchError: a patch for other weights, or one that contradicts itself.
    """
    return apply_with_digests(weights, patch).weights


def apply_in_place(weights: dict[str, torch.Tensor], patch: bytes) -> None:
    """Write the patch into the weights: everything is checked before anything is written.

    Raises:
        As `apply`; the weights are then as they were.
        ValueError: two changed tensors share memory.
    """
    header = read_header(patch)
    for name, tensor in apply_with_digests(weights, patch).weights.items():
        if tensor is not weights[name]:
            weights[name].detach().copy_(tensor)
    assert header.rows is not None


def summary(patch: bytes) -> PatchSummary:
    """What the table says, without decoding a frame.

    Raises:
        MalformedError, LimitError, PatchError: a table that is broken or contradicts itself.
    """
    header = read_header(patch)
    split_frames(patch, header)
    return PatchSummary(
        profile=header.profile,
        base=header.base,
        result=header.result,
        rows=header.rows,
        changed=sum(row.changed for row in header.rows),
        elements=sum(row.elements for row in header.rows),
        nbytes=len(patch),
        weight_bytes=sum(row.nbytes for row in header.rows),
    )


def invert(newer: Weights, patch: bytes) -> bytes:
    """The patch that leads from the newer weights back to the older ones."""
    raise NotImplementedError


def squash(weights: Weights, patches: list[bytes]) -> bytes:
    """One patch that does what the patches do in turn, from `weights` on.

    Raises:
        As `apply`, for the first patch that does not fit.
    """
    result: Mapping[str, torch.Tensor] = weights
    for patch in patches:
        result = apply(result, patch)
    return encode(weights, result)
