"""Apply a patch while it arrives (docs/spec/patch.md, section 5)."""

from collections.abc import Callable, Iterator

import torch

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.applying import AppliedPatch, apply_frame, check_fit, check_result, for_each
from protocol.patch.bounded_buffer import BoundedBuffer
from protocol.patch.codec import Digests, digest_tensor
from protocol.patch.container import PREAMBLE, Header, Mode, TensorRow, header_bytes, read_header
from protocol.patch.values import copy_bits

NewTensors = Callable[[Weights], dict[str, torch.Tensor]]
"""Returns tensors of the names, dtypes and shapes of others, contiguous and aligned on the CPU, with any elements."""


class StreamingApply:
    """The application of a patch while it arrives. With one thread, only one frame is in memory at a time; with more,
    those that the bytes fed together complete.

    Args:
        weights: the weights that the patch is for.
        digests: BLAKE3 of each tensor of `weights`, computed when they were verified; None to compute the digests of
            the unchanged tensors again.
        threads: how many tensors to decode at the same time.
        new_tensors: where the new weights lie, all of them: it is called once, and none of its tensors is one of
            `weights`. None for memory of the process, where unchanged tensors are shared with `weights`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        digests: Digests | None = None,
        threads: int = 1,
        new_tensors: NewTensors | None = None,
    ) -> None:
        self._weights = weights
        self._base_digests = digests
        self._threads = threads
        self._new_tensors = new_tensors
        self._places: dict[str, torch.Tensor] = {}
        self._head = bytearray()
        self._header: Header | None = None
        self._rows: tuple[TensorRow, ...] = ()
        self._next = 0
        self._frame: BoundedBuffer | None = None
        self._result = AppliedPatch({}, {})

    def feed(self, data: bytes) -> list[str]:
        """Process the next bytes of the patch, and return the names of the tensors that they complete.

        Args:
            data: hostile bytes.
        """
        rest = memoryview(data)
        if self._header is None:
            self._head += data
            if len(self._head) < PREAMBLE.size or len(self._head) < header_bytes(self._head):
                return []
            self._header = self._read_table()
            rest = memoryview(bytes(self._head))[self._header.frames_begin :]
            self._head.clear()
        return for_each(self._apply, self._take(rest), self._threads)

    def finish(self) -> AppliedPatch:
        """Return the new weights after all bytes of the patch were processed.

        Raises:
            PatchError: the patch is cut off, or does not give the weights that it promises.
        """
        result = self._result
        if self._header is None or len(result.weights) < len(self._rows):
            raise PatchError("cut off", "patch")
        check_result(result.weights, result.digests, self._header)
        return AppliedPatch(
            {name: result.weights[name] for name in self._weights},
            {name: result.digests[name] for name in self._weights},
        )

    def _read_table(self) -> Header:
        header = read_header(self._head, len(self._weights))
        self._rows = check_fit(self._weights, header.rows)
        if self._base_digests is not None and weights_digest(self._base_digests, self._weights) != header.base:
            raise PatchError("made for other weights than these")
        if self._new_tensors is not None:
            self._places = self._new_tensors(self._weights)
        return header

    def _take(self, rest: memoryview) -> Iterator[tuple[TensorRow, memoryview]]:
        """Yield the frames that more bytes complete, with their rows."""
        while self._next < len(self._rows):
            row = self._rows[self._next]
            self._frame = self._frame or BoundedBuffer(row.size)
            piece = rest[: row.size - self._frame.size]
            self._frame.put(piece)
            rest = rest[len(piece) :]
            if self._frame.size < row.size:
                return
            frame, self._frame = self._frame.frame(), None
            self._next += 1
            yield row, frame
        if len(rest):
            raise PatchError(f"{len(rest)} bytes behind the end", "patch")

    def _apply(self, item: tuple[TensorRow, memoryview]) -> str:
        row, frame = item
        old, place = self._weights[row.name], self._places.get(row.name)
        if row.mode == Mode.UNCHANGED:
            new = old if place is None else copy_bits(old, place)
            digest = self._base_digests[row.name] if self._base_digests is not None else digest_tensor(old)
        else:
            new, digest = apply_frame(old, row, frame, place)
        self._result.weights[row.name], self._result.digests[row.name] = new, digest
        return row.name
