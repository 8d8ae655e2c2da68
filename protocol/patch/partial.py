"""A patch for a node that gets it bit by bit, or that holds only some rows (docs/spec/patch.md, section 5)."""

import math
from collections.abc import Iterator

import torch

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.applying import AppliedPatch, apply_frame, check_fit, check_result
from protocol.patch.bounded_buffer import BoundedBuffer
from protocol.patch.codec import Digests, digest_tensor
from protocol.patch.container import PREAMBLE, Header, Mode, TensorRow, header_bytes, read_header, split_frames
from protocol.patch.frames import decode_range
from protocol.patch.sparse import chunks_of
from protocol.patch.values import bits_of


def row_edges(shape: tuple[int, ...]) -> list[int]:
    """The rows at which a range for `apply_rows` may begin or end: at least every eighth of a large tensor's rows."""
    width = max(1, math.prod(shape[1:]))
    edges = {0, *(edge for chunk in chunks_of(shape) for edge in chunk)}
    return sorted(edge // width for edge in edges if edge % width == 0)


def apply_rows(rows: torch.Tensor, patch: bytes, name: str, first_row: int, of: int) -> torch.Tensor:
    """The new rows of one tensor, for a node that holds only these, as in tensor parallelism.

    Args:
        rows: rows first_row, first_row + 1, ... of the tensor: [R, ...]; begins and ends at one of its `row_edges`.
        of: rows of the whole tensor.

    Returns:
        The new rows, [R, ...]. No digest covers a part of a tensor: the manifest's digest of the patch has to do.

    Raises:
        PatchError, MalformedError, LimitError: a patch that does not fit.
        ValueError: rows that begin or end elsewhere.
    """
    header = read_header(patch)
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        if row.name == name:
            return _new_rows(rows, row, frame, first_row, of)
    raise PatchError("a tensor that the patch does not have", name)


def apply_tensors(held: Weights, patch: bytes) -> dict[str, torch.Tensor]:
    """The new tensors of a node that holds only some of them, as in pipeline or expert parallelism.

    Args:
        held: whole tensors of the weights that the patch is for.

    Returns:
        The same tensors, new where they change, each checked by the eight bytes that the patch has of its digest. The
        digest of all
        weights cannot be: the manifest's digest of the patch has to do.

    Raises:
        PatchError, MalformedError, LimitError: a patch that does not fit.
    """
    header = read_header(patch)
    new = {}
    for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
        if row.name in held:
            (own,) = check_fit({row.name: held[row.name]}, (row,))
            new[row.name] = held[row.name] if own.mode == Mode.UNCHANGED else apply_frame(held[row.name], own, frame)[0]
    missing = held.keys() - new.keys()
    if missing:
        raise PatchError("a tensor that the patch does not have", min(missing))
    return {name: new[name] for name in held}


def _new_rows(rows: torch.Tensor, row: TensorRow, frame: memoryview, first_row: int, of: int) -> torch.Tensor:
    whole = (of, *rows.shape[1:])
    if row.dtype != rows.dtype or row.shape != whole:
        raise PatchError(f"{row.dtype} {row.shape} where the tensor is {rows.dtype} {whole}", row.name)
    edges = row_edges(row.shape)
    if first_row not in edges or first_row + len(rows) not in edges:
        raise ValueError(f"rows {first_row} to {first_row + len(rows)} of {row.name} do not lie between edges")
    if row.mode == Mode.UNCHANGED:
        return rows
    new = torch.empty_like(rows, requires_grad=False)
    decode_range(row, frame, bits_of(rows), bits_of(new), first_row * math.prod(row.shape[1:]))
    return new


class StreamingApply:
    """Applies a patch while it arrives: bytes in, finished tensors out. Holds one frame at a time, in memory of just
    its size.
    """

    def __init__(self, weights: Weights, *, digests: Digests | None = None) -> None:
        self._weights = weights
        self._known = digests
        self._head = bytearray()
        self._header: Header | None = None
        self._rows: tuple[TensorRow, ...] = ()
        self._next = 0
        self._frame: BoundedBuffer | None = None
        self._result = AppliedPatch({}, {})

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes; returns the names of the tensors that they complete.

        Raises:
            As `apply`, as soon as the bytes at hand show it.
        """
        rest = memoryview(data)
        if self._header is None:
            self._head += data
            if len(self._head) < PREAMBLE.size or len(self._head) < header_bytes(self._head):
                return []
            self._header = self._read_table()
            rest = memoryview(bytes(self._head))[self._header.frames_begin :]
            self._head.clear()
        return list(self._take(rest))

    def finish(self) -> AppliedPatch:
        """The new weights, once every byte was fed.

        Raises:
            PatchError: the patch is cut off, or does not lead to the weights that it promises.
        """
        if self._header is None or self._next < len(self._rows):
            raise PatchError("cut off", "patch")
        check_result(self._result.weights, self._result.digests, self._header)
        return self._result

    def _read_table(self) -> Header:
        header = read_header(self._head, len(self._weights))
        self._rows = check_fit(self._weights, header.rows)
        if self._known is not None and weights_digest(self._known, self._weights) != header.base:
            raise PatchError("made for other weights than these")
        return header

    def _take(self, rest: memoryview) -> Iterator[str]:
        """The tensors that more bytes of the frames complete."""
        while self._next < len(self._rows):
            row = self._rows[self._next]
            self._frame = self._frame or BoundedBuffer(row.size)
            piece = rest[: row.size - self._frame.used]
            self._frame.put(piece)
            rest = rest[len(piece) :]
            if self._frame.used < row.size:
                return
            frame, self._frame = self._frame.frame(), None
            self._apply(row, frame)
            self._next += 1
            yield row.name
        if len(rest):
            raise PatchError(f"{len(rest)} bytes behind the end", "patch")

    def _apply(self, row: TensorRow, frame: memoryview) -> None:
        old = self._weights[row.name]
        if row.mode == Mode.UNCHANGED:
            new, digest = old, self._known[row.name] if self._known is not None else digest_tensor(old)
        else:
            new, digest = apply_frame(old, row, frame)
        self._result.weights[row.name], self._result.digests[row.name] = new, digest
