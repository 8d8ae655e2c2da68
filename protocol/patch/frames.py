"""One tensor's frame: the cheapest way to say what changed, and the way back (docs/spec/patch.md, sections 3 and 4)."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch

from protocol.errors import found_in
from protocol.patch.bounded_buffer import OutOfRoomError
from protocol.patch.container import Mode, TensorRow
from protocol.patch.dense import decode_dense, encode_dense, store
from protocol.patch.small_changes import decode_few, encode_few, few_changes
from protocol.patch.sparse import Decoder, Scratch, encode_sparse, read_directory
from protocol.patch.values import Bits, Layout, bits_of, layout_of

PROBE_BLOCKS: Final = 8
PROBE_ELEMENTS: Final = 1024
"""Elements of each of the blocks that dense modes are tried on before a whole tensor is."""

PROBE_MARGIN: Final = 1.25
"""A dense mode is tried in full when the probe promises less than this many times the sparse frame."""

ZSTD_LEVEL: Final = 1  # level 3 came out larger on step planes, and slower

LEAST_BYTES: Final = 12
"""No frame but one of few changes is shorter: a sparse one has the coders' two states, a dense one zstd's own header.
"""

CLASSES_ARE_CHEAP: Final = 16
"""Times that a frame with classes must be smaller than its tensor to be taken without trying one that has none."""


def _probe(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    """Evenly spaced blocks of the tensor; all of it when it is small."""
    if old.size <= PROBE_BLOCKS * PROBE_ELEMENTS:
        return old, new
    starts = np.linspace(0, old.size - PROBE_ELEMENTS, PROBE_BLOCKS).astype(np.int64)
    pieces = [slice(start, start + PROBE_ELEMENTS) for start in starts.tolist()]
    return np.concatenate([old[piece] for piece in pieces]), np.concatenate([new[piece] for piece in pieces])


def _dense_modes(old: Bits, new: Bits, layout: Layout, changed: int, best: int) -> Iterator[Mode]:
    """The dense modes that may be shorter than the `best` bytes of a frame with `changed` changes (0: they were not
    counted).

    Changes may stand in few rows, of which a probe meets too many or too few: what counts is the share of the changes
    in it.
    """
    some_old, some_new = _probe(old, new)
    share = int(np.count_nonzero(some_old != some_new)) / changed if changed else some_old.size / old.size
    below = int(PROBE_MARGIN * best * share) + 64
    for mode in (Mode.STEP_PLANES, Mode.XOR_PLANES, Mode.VALUE_PLANES):
        try:
            encode_dense(some_old, some_new, layout, mode, level=ZSTD_LEVEL, below=below)
        except OutOfRoomError:
            continue
        yield mode


class _Shortest:
    """The shortest frame so far. One of more than half its tensor is not held while others are tried, but made again at
    the end.
    """

    def __init__(self, nbytes: int) -> None:
        self.mode = Mode.STORED
        self.below = nbytes + 1
        self.changed = 0
        self._nbytes = nbytes
        self._make: Callable[[int], tuple[int, memoryview]] | None = None
        self._frame: memoryview | None = None

    def offer(self, mode: Mode, make: Callable[[int], tuple[int, memoryview]]) -> None:
        """Take the frame that `make` gives, given how many bytes it must stay below, and its changes (0: not counted)."""
        if self._frame is not None and 2 * len(self._frame) > self._nbytes:
            self._frame = None
        try:
            changed, frame = make(self.below)
        except OutOfRoomError:
            return
        self.mode, self.changed, self.below, self._make, self._frame = (
            mode,
            changed or self.changed,
            len(frame),
            make,
            frame,
        )

    def frame(self) -> memoryview | None:
        """It, if there is any."""
        if self._frame is None and self._make is not None:
            _, self._frame = self._make(self.below + 1)
        return self._frame


def encode_frame(
    old: torch.Tensor, new: torch.Tensor, profile: str, workspace: Scratch
) -> tuple[Mode, int, memoryview]:
    """The cheapest frame of one tensor: its mode, how many elements change, its bytes.

    With classes, unless the profile or the dtype has none; without them where these cost much.
    """
    before, after, layout, shape = bits_of(old), bits_of(new), layout_of(old.dtype), tuple(old.shape)
    few = few_changes(before, after)
    if few is not None and not few.size:
        return Mode.UNCHANGED, 0, memoryview(b"")
    best = _Shortest(before.nbytes)
    if few is not None:
        best.offer(Mode.FEW, lambda below: (few.size, encode_few(before, after, few, layout, below)))
    ways = (True, False) if profile == "compact" and layout.is_float else (False,)
    for classed in ways:
        if best.below > LEAST_BYTES and (classed is ways[0] or best.below * CLASSES_ARE_CHEAP > before.nbytes):
            best.offer(
                Mode.SPARSE,
                lambda below, classed=classed: encode_sparse(  # type: ignore[misc]
                    before, after, shape, layout, workspace, below, classed=classed
                ),
            )
    if best.below > LEAST_BYTES:
        for mode in _dense_modes(before, after, layout, best.changed, best.below):
            best.offer(
                mode,
                lambda below, mode=mode: (  # type: ignore[misc]
                    0,
                    encode_dense(before, after, layout, mode, level=ZSTD_LEVEL, below=below),
                ),
            )
    frame = best.frame()
    changed = best.changed or int(np.count_nonzero(before != after))
    return best.mode, changed, frame if frame is not None else store(before, after, layout)


def decode_frame(
    row: TensorRow, frame: memoryview, old: Bits, target: Bits | None = None, *, back: bool = False
) -> Iterator[tuple[int, Bits]]:
    """The new elements of a changed tensor, piece by piece.

    Args:
        old: the previous elements, flat; the newer ones when `back`, which then yields the previous ones.
        target: where the new elements go; without it, each piece is good only until the next is asked for.

    Yields:
        The offset of a piece and its new elements.

    Raises:
        PatchError, MalformedError, LimitError: a frame that does not fit; the error names the tensor.
    """
    with found_in(row.name):
        yield from _decode(row, frame, old, target, back)


def _decode(
    row: TensorRow, frame: memoryview, old: Bits, target: Bits | None, back: bool
) -> Iterator[tuple[int, Bits]]:
    layout = layout_of(row.dtype)
    if row.mode != Mode.SPARSE:
        for begin, new in _blocks(row, frame, old, layout, back=back):
            if target is not None:
                np.copyto(target[begin : begin + new.size], new)
            yield begin, new
        return
    model, chunks = read_directory(frame, row.shape, row.changed, layout)
    decoder = Decoder(frame, model, back=back)
    for chunk in chunks:
        after = None if target is None else target[chunk.begin : chunk.end]
        for begin, piece in decoder.pieces(chunk, old[chunk.begin : chunk.end], after):
            yield chunk.begin + begin, piece


def _blocks(
    row: TensorRow, frame: memoryview, old: Bits, layout: Layout, *, back: bool = False, first: int = 0
) -> Iterator[tuple[int, Bits]]:
    """The new elements by the modes that are not sparse; `old` are those from `first` on."""
    if row.mode == Mode.FEW:
        return decode_few(old, frame, row.changed, layout, back=back, first=first, of=row.elements)
    return decode_dense(old, frame, layout, row.mode, back=back, first=first, of=row.elements)


def decode_range(row: TensorRow, frame: memoryview, old: Bits, new: Bits, first: int) -> None:
    """The new elements `first`, `first` + 1, ... of a changed tensor, from the previous ones; both flat, between
    chunks.

    Raises:
        PatchError, MalformedError, LimitError: a frame that does not fit; the error names the tensor.
    """
    layout = layout_of(row.dtype)
    with found_in(row.name):
        if row.mode != Mode.SPARSE:
            for begin, block in _blocks(row, frame, old, layout, first=first):
                np.copyto(new[begin : begin + block.size], block)
            return
        model, chunks = read_directory(frame, row.shape, row.changed, layout)
        decoder = Decoder(frame, model)
        for chunk in chunks:
            if chunk.begin >= first and chunk.end <= first + old.size:
                part = slice(chunk.begin - first, chunk.end - first)
                for _ in decoder.pieces(chunk, old[part], new[part]):
                    pass
