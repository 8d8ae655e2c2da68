"""Apply a patch to weights, into new tensors (docs/spec/patch.md, section 5).

Order of checks: the table against the limits, the table against the given tensors (names, dtypes, shapes), the digest
of the base if it is given, each frame as it is decoded, the digest of each changed tensor, the digest of the result.
The digest of the result covers every element, changed or not, so a wrong base cannot pass.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from blake3 import blake3

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.codec import Digests, digest_tensor
from protocol.patch.container import CHECK_BYTES, Header, Mode, TensorRow, read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.values import bits_of, empty_like

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """The new weights, with the BLAKE3 of each of their tensors."""

    weights: dict[str, torch.Tensor]
    digests: dict[str, bytes]


def check_fit(weights: Weights, rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Check that the rows of a table describe tensors of the weights, and return the rows.

    Raises:
        PatchError: the weights do not have a tensor, or have it with another dtype or shape.
    """
    result = []
    for row in rows:
        tensor = weights.get(row.name)
        if tensor is None:
            raise PatchError("a tensor that the weights do not have", row.name)
        if tensor.dtype != row.dtype or tuple(tensor.shape) != row.shape:
            actual = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise PatchError(f"{row.dtype} {row.shape} where the weights have {actual}", row.name)
        result.append(row)
    return tuple(result)


def check_tensor(row: TensorRow, digest: bytes) -> None:
    """Check that a new tensor has the digest that its row promises.

    Args:
        digest: BLAKE3 of the new tensor.

    Raises:
        PatchError: it has another digest, because the patch was applied to a wrong base.
    """
    if digest[:CHECK_BYTES] != row.check:
        raise PatchError("the patch does not lead to the tensor that it promises: a wrong base", row.name)


def check_result(weights: Weights, digests: Digests, header: Header) -> None:
    """Check that new weights have the digest that the patch promises.

    Args:
        digests: BLAKE3 of each new tensor.

    Raises:
        PatchError: they have not, because the patch was applied to a wrong base.
    """
    if weights_digest(digests, weights) != header.result:
        raise PatchError("the patch does not lead to the weights that it promises: a wrong base")


def apply_frame(
    old: torch.Tensor, row: TensorRow, frame: memoryview, new: torch.Tensor | None = None
) -> tuple[torch.Tensor, bytes]:
    """Decode a changed tensor; return the new tensor and its BLAKE3.

    Args:
        new: where to write it; None for new memory.
    """
    new = empty_like(old) if new is None else new
    hasher = blake3()
    for _, piece in decode_frame(row, frame, bits_of(old), bits_of(new)):
        hasher.update(piece.data.cast("B"))
    digest = hasher.digest()
    check_tensor(row, digest)
    return new, digest


def for_each(
    work: Callable[[tuple[TensorRow, memoryview]], T], items: Iterable[tuple[TensorRow, memoryview]], threads: int
) -> list[T]:
    """Do some work for each row and its frame, on so many threads, and return the results in their order."""
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def apply_with_digests(
    weights: Weights, patch: bytes, *, digests: Digests | None = None, threads: int = 1
) -> AppliedPatch:
    """Apply a patch as `apply` does, and return the digests of the new tensors too.

    Args:
        patch: hostile bytes.
        digests: BLAKE3 of each tensor of `weights`, computed when they were verified; None to compute the digests of
            the unchanged tensors again.
        threads: how many tensors to decode at the same time.

    Raises:
        MalformedError, LimitError, PatchError: as `apply`.
    """
    header = read_header(patch, len(weights))
    rows = check_fit(weights, header.rows)
    if digests is not None and weights_digest(digests, weights) != header.base:
        raise PatchError("made for other weights than these")

    def apply_row(item: tuple[TensorRow, memoryview]) -> tuple[torch.Tensor, bytes]:
        row, frame = item
        old = weights[row.name]
        if row.mode == Mode.UNCHANGED:
            return old, digests[row.name] if digests is not None else digest_tensor(old)
        return apply_frame(old, row, frame)

    items = zip(rows, split_frames(patch, header), strict=True)
    pairs = dict(zip((row.name for row in rows), for_each(apply_row, items, threads), strict=True))
    result = AppliedPatch({name: pairs[name][0] for name in weights}, {name: pairs[name][1] for name in weights})
    check_result(result.weights, result.digests, header)
    return result


def apply(weights: Weights, patch: bytes) -> dict[str, torch.Tensor]:
    """Return the weights that a patch gives. Unchanged tensors are shared with `weights`; changed ones are new.

    Args:
        patch: hostile bytes.
    """
    return apply_with_digests(weights, patch).weights
