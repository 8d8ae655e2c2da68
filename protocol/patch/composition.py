"""Patches that lead back, and several patches as one (docs/spec/patch.md, section 6). One tensor's memory at a time."""

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
    for _ in decode_frame(row, frame, bits_of(newer), bits_of(older), back=True):
        pass
    return older


def _row(like: TensorRow, mode: Mode, changed: int, frame: memoryview, digest: bytes) -> TensorRow:
    check = b"" if mode == Mode.UNCHANGED else digest[:CHECK_BYTES]
    return TensorRow(like.name, like.dtype, like.shape, mode, changed, len(frame), check)


def invert(newer: Weights, patch: bytes) -> bytes:
    """The patch that leads from the newer weights back to the older ones.

    Raises:
        MalformedError, LimitError, PatchError: a patch that does not lead to `newer`, or that sent a tensor whole
            (value planes: they do not tell the older values).
    """
    header = read_header(patch, len(newer))
    table = check_fit(newer, header.rows)
    workspace = Scratch()
    rows, frames = [], []
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for row, frame in zip(table, split_frames(patch, header), strict=True):
        tensor = newer[row.name]
        before[row.name] = after[row.name] = digest_tensor(tensor)
        mode, changed, back = Mode.UNCHANGED, 0, memoryview(b"")
        if row.mode != Mode.UNCHANGED:
            if after[row.name][:CHECK_BYTES] != row.check:
                raise PatchError("not the tensor that the patch leads to", row.name)
            older = _older(tensor, row, frame)
            before[row.name] = digest_tensor(older)
            mode, changed, back = encode_frame(tensor, older, header.profile, workspace)
        rows.append(_row(row, mode, changed, back, before[row.name]))
        frames.append(back)
    if weights_digest(after, newer) != header.result or weights_digest(before, newer) != header.base:
        raise PatchError("not the weights that the patch leads to")
    return write_container(header.profile, header.result, header.base, rows, frames)


def squash(weights: Weights, patches: Sequence[bytes]) -> bytes:
    """One patch that does what the patches do in turn, from `weights` on.

    Raises:
        MalformedError, LimitError, PatchError: as `apply`, for the first patch that does not fit.
        ValueError: no patch.
    """
    if not patches:
        raise ValueError("at least one patch")
    headers = [read_header(patch, len(weights)) for patch in patches]
    tables = [check_fit(weights, header.rows) for header in headers]
    frames = [split_frames(patch, header) for patch, header in zip(patches, headers, strict=True)]
    for earlier, later in pairwise(headers):
        if earlier.result != later.base:
            raise PatchError("a patch that does not begin where the one before it ends")
    workspace = Scratch()
    rows, squashed = [], []
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
        mode, changed, whole = encode_frame(old, new, headers[-1].profile, workspace)
        after[row.name] = digest
        rows.append(_row(row, mode, changed, whole, digest))
        squashed.append(whole)
    if weights_digest(before, weights) != headers[0].base or weights_digest(after, weights) != headers[-1].result:
        raise PatchError("the patches do not lead to the weights that they promise: a wrong base")
    return write_container(headers[-1].profile, headers[0].base, headers[-1].result, rows, squashed)
