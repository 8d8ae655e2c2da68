"""The frame of one tensor: encode it in the smallest form, and decode it (docs/spec/patch.md, sections 3 and 4)."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch

from protocol.errors import error_context
from protocol.patch.container import Mode, TensorRow
from protocol.patch.fields import BufferFullError
from protocol.patch.plain_frames import (
    count_changes,
    decode_dense,
    decode_small_changes,
    encode_dense,
    encode_raw,
    encode_small_changes,
    find_small_changes,
)
from protocol.patch.sparse import Decoder, Scratch, encode_sparse, read_directory
from protocol.patch.values import Bits, Decoded, Layout, bits_of, layout_of

PROBE_BLOCKS: Final = 8
PROBE_ELEMENTS: Final = 1024
"""Elements of each block on which the dense modes are tried before the whole tensor."""

PROBE_MARGIN: Final = 1.25
"""A dense mode is tried on the whole tensor if its frame of the probe promises less than this many times the best size.
"""

ZSTD_LEVEL: Final = 1  # on step planes, level 3 was slower and its frames were larger

MIN_FRAME_BYTES: Final = 12
"""The smallest frame of the sparse and dense modes: a sparse frame has two coder states, a dense frame a zstd header.
"""

CLASSES_SUFFICE_RATIO: Final = 16
"""If a frame with classes is so many times smaller than its tensor, no frame without classes is tried."""


def _probe(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    """Return evenly spaced blocks of a tensor, or all of it if it is small."""
    if old.size <= PROBE_BLOCKS * PROBE_ELEMENTS:
        return old, new
    # Rows differ in how much they change, so the blocks are spread over all of them.
    starts = np.linspace(0, old.size - PROBE_ELEMENTS, PROBE_BLOCKS).astype(np.int64)
    pieces = [slice(start, start + PROBE_ELEMENTS) for start in starts.tolist()]
    return np.concatenate([old[piece] for piece in pieces]), np.concatenate([new[piece] for piece in pieces])


def _dense_modes(old: Bits, new: Bits, layout: Layout, changes: int, best: int) -> Iterator[Mode]:
    """Yield the dense modes whose frame may be smaller than `best` bytes.

    The changes may be concentrated in a few rows, of which the probe contains too many or too few. So the size of its
    frame is scaled by the share of the changes that it contains.

    Args:
        changes: number of changed elements; 0 if it is unknown.
        best: size of the smallest frame so far, in bytes.
    """
    # What the best frame so far costs for the probe's share, with a margin and the constant costs of a zstd frame.
    old_probe, new_probe = _probe(old, new)
    share = int(np.count_nonzero(old_probe != new_probe)) / changes if changes else old_probe.size / old.size
    below = int(PROBE_MARGIN * best * share) + 64
    for mode in (Mode.STEP_PLANES, Mode.XOR_PLANES, Mode.VALUE_PLANES):
        try:
            encode_dense(old_probe, new_probe, layout, mode, level=ZSTD_LEVEL, below=below)
        except BufferFullError:
            continue
        yield mode


class _SmallestFrame:
    """The smallest frame of a tensor so far. To save memory, a frame of more than half its tensor is dropped while
    others are tried, and encoded again at the end.

    Attributes:
        below: size that the next frame must stay below, in bytes.
        changes: number of changed elements; 0 if it is unknown.
    """

    def __init__(self, nbytes: int) -> None:
        self.mode = Mode.RAW_STEP_PLANES
        self.below = nbytes + 1
        self.changes = 0
        self._nbytes = nbytes
        self._encode: Callable[[int], tuple[int, memoryview]] | None = None
        self._frame: memoryview | None = None

    def offer(self, mode: Mode, encode: Callable[[int], tuple[int, memoryview]]) -> None:
        """Encode a frame and keep it if it is smaller than all others so far.

        Args:
            encode: takes the size that the frame must stay below, in bytes; returns the number of changes (0 if it is
                unknown) and the frame.
        """
        # The next attempt needs a buffer of the same size, so a large frame would double the peak of memory.
        if self._frame is not None and 2 * len(self._frame) > self._nbytes:
            self._frame = None
        try:
            changes, frame = encode(self.below)
        except BufferFullError:
            return
        self.mode, self.changes, self.below = mode, changes or self.changes, len(frame)
        self._encode, self._frame = encode, frame

    def frame(self) -> memoryview | None:
        """Return the smallest frame, or None if none was smaller than the tensor."""
        # The best frame was dropped for a later attempt, which failed: the same work gives the same bytes.
        if self._frame is None and self._encode is not None:
            _, self._frame = self._encode(self.below + 1)
        return self._frame


def encode_frame(old: torch.Tensor, new: torch.Tensor, profile: str, scratch: Scratch) -> tuple[Mode, int, memoryview]:
    """Encode the smallest frame of one tensor.

    A sparse frame with classes is tried first if the profile and the dtype have classes, and one without classes if the
    result is still large.

    Args:
        scratch: memory of the calling thread.

    Returns:
        The mode, the number of changed elements, and the frame.
    """
    before, after, layout, shape = bits_of(old), bits_of(new), layout_of(old.dtype), tuple(old.shape)
    # 1. Few changes or none are found in one pass, which ends early if there are more.
    places = find_small_changes(before, after)
    if places is not None and not places.size:
        return Mode.UNCHANGED, 0, memoryview(b"")
    best = _SmallestFrame(before.nbytes)
    if places is not None:
        best.offer(
            Mode.SMALL_CHANGES,
            lambda below: (places.size, encode_small_changes(before, after, places, layout, below)),
        )
    # 2. Sparse frames. Each attempt must stay below the best size so far, so a worse one ends early.
    class_options = (True, False) if profile == "compact" and layout.is_float else (False,)
    for classes in class_options:
        first = classes is class_options[0]
        if best.below > MIN_FRAME_BYTES and (first or best.below * CLASSES_SUFFICE_RATIO > before.nbytes):
            best.offer(
                Mode.SPARSE,
                lambda below, classes=classes: encode_sparse(  # type: ignore[misc]
                    before, after, shape, layout, scratch, below, classes=classes
                ),
            )
    # 3. Dense frames, of the modes that a probe shows to be worth a pass of zstd over the whole tensor.
    if best.below > MIN_FRAME_BYTES:
        for mode in _dense_modes(before, after, layout, best.changes, best.below):
            best.offer(
                mode,
                lambda below, mode=mode: (  # type: ignore[misc]
                    0,
                    encode_dense(before, after, layout, mode, level=ZSTD_LEVEL, below=below),
                ),
            )
    # 4. Step planes without compression always fit: no frame is larger than its tensor.
    frame = best.frame()
    changes = best.changes or count_changes(before, after)
    return best.mode, changes, frame if frame is not None else encode_raw(before, after, layout)


def decode_frame(row: TensorRow, frame: memoryview, old: Bits, target: Bits | None = None) -> Iterator[Decoded]:
    """Yield the new elements of a changed tensor and the indices of the changed ones, piece by piece, in order.

    Args:
        frame: hostile bytes.
        old: the previous elements, flat.
        target: an array for the new elements, which may be `old` itself; if None, each piece is valid only until the
            next one is requested. Indices are in any case.
    """
    layout = layout_of(row.dtype)
    with error_context(row.name):
        if row.mode != Mode.SPARSE:
            if row.mode == Mode.SMALL_CHANGES:
                blocks = decode_small_changes(old, frame, row.changed, layout)
            else:
                blocks = decode_dense(old, frame, layout, row.mode)
            for begin, new, places in blocks:
                if target is not None:
                    np.copyto(target[begin : begin + new.size], new)
                yield begin, new, places
            return
        # The directory is checked as a whole; then each chunk is decoded by itself, from its own sections.
        model, chunks = read_directory(frame, row.shape, row.changed, layout)
        decoder = Decoder(frame, model)
        for chunk in chunks:
            after = None if target is None else target[chunk.begin : chunk.end]
            yield from decoder.pieces(chunk, old[chunk.begin : chunk.end], after)
