"""Invert a patch, and combine several patches into one (docs/spec/patch.md, section 6).

The functions need the memory of one tensor at a time.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.applying import apply_frame, check_fit
from protocol.patch.codec import digest_tensor
from protocol.patch.container import CHECK_BYTES, Mode, TensorRow, read_header, split_frames, write_container
from protocol.patch.frames import decode_frame, encode_frame
from protocol.patch.sparse import Scratch
from protocol.patch.values import bits_of


def _older(newer: torch.Tensor, row: TensorRow, frame: memoryview) -> torch.Tensor:
    older = torch.empty_like(newer, requires_grad=False)
    for _ in decode_frame(row, frame, bits_of(newer), bits_of(older), inverse=True):
        pass
    return older


def _row(like: TensorRow, mode: Mode, changes: int, frame: memoryview, digest: bytes) -> TensorRow:
    check = b"" if mode == Mode.UNCHANGED else digest[:CHECK_BYTES]
    return TensorRow(like.name, like.dtype, like.shape, mode, changes, len(frame), check)


def invert(newer: Weights, patch: bytes) -> bytes:
    """Build the patch from the newer weights back to the older ones.

    Args:
        newer: the weights that the patch gives.
        patch: hostile bytes.

    Raises:
        MalformedError, LimitError: the bytes are no patch, or exceed a limit.
        PatchError: the patch does not give `newer`, or contains a tensor as value planes, which do not contain the
            older values.
    """
    header = read_header(patch, len(newer))
    table = check_fit(newer, header.rows)
    scratch = Scratch()
    rows, frames = [], []
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for row, frame in zip(table, split_frames(patch, header), strict=True):
        tensor = newer[row.name]
        before[row.name] = after[row.name] = digest_tensor(tensor)
        mode, changes, inverse = Mode.UNCHANGED, 0, memoryview(b"")
        if row.mode != Mode.UNCHANGED:
            if after[row.name][:CHECK_BYTES] != row.check:
                raise PatchError("not the tensor that the patch leads to", row.name)
            older = _older(tensor, row, frame)
            before[row.name] = digest_tensor(older)
            mode, changes, inverse = encode_frame(tensor, older, header.profile, scratch)
        rows.append(_row(row, mode, changes, inverse, before[row.name]))
        frames.append(inverse)
    if weights_digest(after, newer) != header.result or weights_digest(before, newer) != header.base:
        raise PatchError("not the weights that the patch leads to")
    return write_container(header.profile, header.result, header.base, rows, frames)


def squash(weights: Weights, patches: Sequence[bytes]) -> bytes:
    """Build one patch that has the effect of several consecutive patches.

    Args:
        weights: the weights that the first patch is for.
        patches: hostile bytes, at least one patch.

    Raises:
        MalformedError, LimitError, PatchError: as `apply`, for the first patch that does not fit.
        ValueError: there is no patch.
    """
    if not patches:
        raise ValueError("squash needs at least one patch")
    headers = [read_header(patch, len(weights)) for patch in patches]
    tables = [check_fit(weights, header.rows) for header in headers]
    frames = [split_frames(patch, header) for patch, header in zip(patches, headers, strict=True)]
    for earlier, later in pairwise(headers):
        if earlier.result != later.base:
            raise PatchError("a patch is for other weights than the patch before it gives")
    scratch = Scratch()
    rows, new_frames = [], []
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for steps in zip(*(zip(*pair, strict=True) for pair in zip(tables, frames, strict=True)), strict=True):
        row = steps[0][0]
        old = weights[row.name]
        new, digest = old, digest_tensor(old)
        before[row.name] = digest
        for own, frame in steps:
            if own.mode != Mode.UNCHANGED:
                new, digest = apply_frame(new, own, frame)
        mode, changes, combination = encode_frame(old, new, headers[-1].profile, scratch)
        after[row.name] = digest
        rows.append(_row(row, mode, changes, combination, digest))
        new_frames.append(combination)
    if weights_digest(before, weights) != headers[0].base or weights_digest(after, weights) != headers[-1].result:
        raise PatchError("the patches do not lead to the weights that they promise: a wrong base")
    return write_container(headers[-1].profile, headers[0].base, headers[-1].result, rows, new_frames)
