"""The frame of one tensor, or of joined ones: encode it in the smallest form, and decode it (docs/spec/patch.md,
sections 3 and 4).

A frame of rows is that of the rows with a change, behind the numbers of these rows. Only a few rows of an
embedding may be touched, and its elements do not tell which.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError, PatchError, error_context
from protocol.patch.container import Mode, TensorRow
from protocol.patch.dense import decode_steps, encode_steps
from protocol.patch.fields import BufferFullError, Cursor, gather, varint
from protocol.patch.plain_frames import (
    BLOCK_ELEMENTS,
    PLANES,
    count_changes,
    decode_plain,
    decode_small_changes,
    encode_planes,
    encode_raw,
    encode_small_changes,
    find_small_changes,
)
from protocol.patch.sparse import MAX_MODEL_BYTES, PIECE_ELEMENTS, Decoder, Scratch, encode_sparse, read_directory
from protocol.patch.values import Bits, Decoded, Layout, layout_of

PROBE_BLOCKS: Final = 8
PROBE_ELEMENTS: Final = 1024
"""Elements of each block on which planes are tried before the whole tensor."""

PROBE_MARGIN: Final = 1.25
"""Planes are tried on the whole tensor if their frame of the probe promises less than this many times the best size."""

PLANES_BITS: Final = 9
"""Planes are tried if a change takes at least so many bits: they are for changes that are no small steps."""

DENSE_SAMPLE: Final = 4096
DENSE_SHARE: Final = 0.12
"""A dense frame is tried, instead of sparse ones, if more than this share of a sample of elements has changed. It takes
the same time for each element, a sparse frame ten times as much for each change.
"""
FEW_ELEMENTS: Final = 1 << 14
"""Both are tried for fewer elements: the eight states of a dense frame take 32 bytes."""

ZSTD_LEVEL: Final = 1  # on planes of steps, level 3 was slower and its frames were larger

MIN_FRAME_BYTES: Final = 12
"""The smallest frame of the sparse and dense modes: a sparse frame has two coder states, a dense frame a zstd header.
"""

CLASSES_SUFFICE_RATIO: Final = 16
"""A frame without classes saves bytes of the model. So none is tried if the one with classes is so many times as large
as a model, or so many times smaller than its tensor.
"""

MANY_CHANGES: Final = 4
"""No frame of the whole tensor is tried if its touched rows have more changes than so many each."""

RICE_PART: Final = 177
"""256ths of a mean gap that the low bits of Rice's code should span: the natural logarithm of 2."""

_WHERE: Final = "frame of rows"

SAMPLE_ROWS: Final = 64
MOST_TOUCHED_ROWS: Final = 0.75
"""A frame of rows is tried if at most this share of a sample of rows has a change."""


def _probe(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    """Return evenly spaced blocks of a tensor, or all of it if it is small."""
    if old.size <= PROBE_BLOCKS * PROBE_ELEMENTS:
        return old, new
    # Rows differ in how much they change, so the blocks are spread over all of them.
    starts = np.linspace(0, old.size - PROBE_ELEMENTS, PROBE_BLOCKS).astype(np.int64)
    pieces = [slice(start, start + PROBE_ELEMENTS) for start in starts.tolist()]
    return np.concatenate([old[piece] for piece in pieces]), np.concatenate([new[piece] for piece in pieces])


def _plane_modes(old: Bits, new: Bits, changes: int, best: int) -> Iterator[Mode]:
    """Yield the modes of planes whose frame may be smaller than the smallest one so far, `best` bytes.

    The changes, 0 if their number is unknown, may be concentrated in a few rows, of which the probe contains too many
    or too few. So the size of its frame is scaled by the share of the changes that it contains.
    """
    # What the best frame so far costs for the probe's share, with a margin and the constant costs of a zstd frame.
    old_probe, new_probe = _probe(old, new)
    share = int(np.count_nonzero(old_probe != new_probe)) / changes if changes else old_probe.size / old.size
    below = int(PROBE_MARGIN * best * share) + 64
    for mode in PLANES:
        try:
            encode_planes(old_probe, new_probe, mode, level=ZSTD_LEVEL, below=below)
        except BufferFullError:
            continue
        yield mode


class _SmallestFrame:
    """The smallest frame of a tensor so far; a large one is dropped to save memory, and encoded again at the end."""

    def __init__(self, nbytes: int) -> None:
        self.mode = Mode.RAW
        self.below = nbytes + 1  # size that the next frame must stay below, in bytes
        self.changes = 0  # number of changed elements; 0 if it is unknown
        self._nbytes = nbytes
        self._encode: Callable[[int], tuple[int, memoryview]] | None = None
        self._frame: memoryview | None = None

    def offer(self, mode: Mode, encode: Callable[[int], tuple[int, memoryview]]) -> None:
        """Encode a frame that must stay below a size, and keep it if it is smaller than all others so far."""
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


def encode_frame(
    before: Bits, after: Bits, shape: Sequence[int], layout: Layout, profile: str, scratch: Scratch
) -> tuple[Mode, int, memoryview]:
    """Return mode, number of changed elements, and the smallest frame of one tensor, or of joined ones as one of one
    dimension. A sparse frame with classes is tried first if the profile and the dtype have classes, and one without if
    it is still large.
    """
    # 1. Few changes or none are found in one pass, which ends early if there are more.
    places = find_small_changes(before, after)
    if places is not None and not places.size:
        return Mode.UNCHANGED, 0, memoryview(b"")
    best = _SmallestFrame(before.nbytes)
    if places is not None:
        best.offer(
            Mode.SMALL_CHANGES, lambda below: (places.size, encode_small_changes(before, after, places, layout, below))
        )
    elif (touched := _touched_rows(before, after, shape)) is not None:
        best.offer(Mode.ROWS, lambda below: encode_rows(before, after, touched, layout, profile, scratch, below))
        # Rows with some changes each are not worth a look at all others.
        own = best.frame()
        if own is not None and best.changes > MANY_CHANGES * np.count_nonzero(touched):
            return best.mode, best.changes, own
    # 2. A dense frame, or sparse ones. Each attempt must stay below the best size so far, so a worse one ends early.
    stride = max(1, before.size // DENSE_SAMPLE) | 1  # odd: of a power of two, the sample would be a few columns
    dense = (before[::stride] != after[::stride]).mean() > DENSE_SHARE
    if dense:
        best.offer(Mode.STEPS, lambda below: encode_steps(before, after, layout, scratch, below))
    if not dense or before.size < FEW_ELEMENTS:
        class_options = (True, False) if profile == "compact" and layout.is_float else (False,)
        for classes in class_options:
            first = classes is class_options[0]
            worth = before.nbytes < CLASSES_SUFFICE_RATIO * best.below < CLASSES_SUFFICE_RATIO**2 * MAX_MODEL_BYTES
            if best.below > MIN_FRAME_BYTES and (first or worth):
                best.offer(
                    Mode.SPARSE,
                    lambda below, classes=classes: encode_sparse(  # type: ignore[misc]
                        before, after, layout, scratch, below, classes=classes
                    ),
                )
    # 3. Planes, in the modes that a probe shows to be worth a pass of zstd over the whole tensor.
    if best.below > MIN_FRAME_BYTES and 8 * best.below > PLANES_BITS * best.changes:
        for mode in _plane_modes(before, after, best.changes, best.below):
            best.offer(
                mode,
                lambda below, mode=mode: (  # type: ignore[misc]
                    0,
                    encode_planes(before, after, mode, level=ZSTD_LEVEL, below=below),
                ),
            )
    # 4. The elements themselves always fit: no frame is larger than its tensor.
    frame = best.frame()
    changes = best.changes or count_changes(before, after)
    return best.mode, changes, frame if frame is not None else encode_raw(after)


def _touched_rows(old: Bits, new: Bits, shape: Sequence[int]) -> NDArray[np.bool_] | None:
    """Return which rows have a change: bool [rows]; None if a sample of them shows that nearly all have."""
    if len(shape) < 2:
        return None
    before, after = (bits.reshape(shape[0], -1) for bits in (old, new))
    sample = slice(None, None, max(1, shape[0] // SAMPLE_ROWS))
    if (before[sample] != after[sample]).any(axis=1).mean() > MOST_TOUCHED_ROWS:
        return None
    step = max(1, BLOCK_ELEMENTS // before.shape[1])
    blocks = (slice(begin, begin + step) for begin in range(0, shape[0], step))
    return np.concatenate([(before[block] != after[block]).any(axis=1) for block in blocks])


def _low_bits(count: int, rows: int) -> int:
    """Return how many lower bits of a gap Rice's code stores as they are, for `count` of so many rows."""
    # About the logarithm of 0.69 mean gaps, which the receiver can compute as well.
    return max(0, (RICE_PART * rows // (256 * count)).bit_length() - 1)


def _write_places(places: NDArray[np.int64], rows: int) -> bytes:
    """Code ascending row numbers: Rice's code of the gaps between them takes about their entropy."""
    gaps, shift = np.diff(places, prepend=-1) - 1, _low_bits(places.size, rows)
    # Each gap's upper part in unary, as a one behind so many zeros; then the lower bits of all gaps.
    unary = np.zeros(int((gaps >> shift).sum()) + places.size, np.uint8)
    unary[np.cumsum((gaps >> shift) + 1) - 1] = 1
    low = (gaps[:, None] >> np.arange(shift) & 1).astype(np.uint8)
    bits = np.packbits(np.concatenate((unary, low.reshape(-1))), bitorder="little")
    return varint(len(bits)) + bits.tobytes()


def _read_places(cursor: Cursor, rows: int) -> NDArray[np.int64]:
    """Read ascending row numbers, behind their count, from hostile bytes: int64."""
    if not (count := cursor.varint(rows)):
        raise MalformedError("no rows", _WHERE)
    # The unary part has a one for each number, and at most rows / 2^shift zeros.
    shift = _low_bits(count, rows)
    data = cursor.take(cursor.varint((count * (shift + 1) + (rows >> shift)) // 8 + 1))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    ones = np.flatnonzero(bits)[:count]
    begin = int(ones[-1]) + 1 if ones.size else 0
    end = begin + count * shift
    if ones.size < count or -(-end // 8) * 8 != bits.size or bits[end:].any():
        raise MalformedError("row numbers of another length", _WHERE)
    low = bits[begin:end].reshape(count, shift).astype(np.int64) @ (1 << np.arange(shift))
    places: NDArray[np.int64] = np.cumsum(((np.diff(ones, prepend=-1) - 1) << shift) + low + 1) - 1
    if places[-1] >= rows:
        raise PatchError("a row past the end", _WHERE)
    return places


def encode_rows(
    old: Bits, new: Bits, touched: NDArray[np.bool_], layout: Layout, profile: str, scratch: Scratch, below: int
) -> tuple[int, memoryview]:
    """Encode a frame of rows, which must stay below so many bytes; return the number of changes and the frame."""
    rows, places = touched.size, np.flatnonzero(touched)
    before, after = (bits.reshape(rows, -1)[touched].reshape(-1) for bits in (old, new))
    mode, changes, frame = encode_frame(before, after, (before.size,), layout, profile, scratch)
    head = varint(places.size) + _write_places(places, rows) + bytes((mode,))
    return changes, gather((head, bytes(frame)), below - 1)


def _decode_rows(row: TensorRow, frame: memoryview, old: Bits, target: Bits | None) -> Iterator[Decoded]:
    """Decode a frame of rows; see `decode_frame`. The touched rows are in memory twice."""
    # Rows of one element would take many times the memory of the tensor: 16 bytes for each, and more.
    if len(row.shape) < 2:
        raise MalformedError("rows of a tensor of one dimension", _WHERE)
    rows = row.shape[0]
    cursor = Cursor(frame, _WHERE)
    places = _read_places(cursor, rows)
    mode, begin = cursor.byte(), cursor.offset
    if mode in (Mode.UNCHANGED, Mode.ROWS, Mode.JOINED) or mode not in Mode.__members__.values():
        raise MalformedError(f"rows of the mode {mode}", row.name)
    before = old.reshape(rows, -1)
    after, width = before[places], before.shape[1]
    inner, flat = row._replace(shape=(after.size,), mode=Mode(mode)), after.reshape(-1)
    for _ in decode_frame(inner, frame[begin:], flat, flat, places=False):
        pass
    step = max(1, PIECE_ELEMENTS // width)
    scratch: Bits = np.empty(min(step, rows) * width, old.dtype)
    for top in range(0, rows, step):
        source = before[top : top + step]
        own = slice(*np.searchsorted(places, (top, top + step)).tolist())
        # Compared before they are written, since the target may be the old elements themselves.
        changed, columns = np.nonzero(source[places[own] - top] != after[own])
        if np.unique(changed).size != after[own].shape[0]:
            raise PatchError("a row without a change", _WHERE)
        piece = (scratch if target is None else target[top * width :])[: source.size].reshape(source.shape)
        np.copyto(piece, source)
        piece[places[own] - top] = after[own]
        yield top * width, piece.reshape(-1), (places[own] - top)[changed] * width + columns


def decode_frame(
    row: TensorRow, frame: memoryview, old: Bits, target: Bits | None = None, *, places: bool = True
) -> Iterator[Decoded]:
    """Decode hostile bytes: yield a changed tensor's new elements and the indices of the changed ones, piece by piece,
    in order. The old and new elements are flat, and may lie in the same array; without a target, each piece is valid
    only until the next one is requested. Indices are in any case; without `places`, they may be missing.
    """
    layout = layout_of(row.dtype)
    with error_context(row.name):
        if row.mode == Mode.ROWS:
            yield from _decode_rows(row, frame, old, target)
        elif row.mode == Mode.STEPS:
            yield from decode_steps(old, frame, row.changed, layout, target, places=places)
        elif row.mode == Mode.SPARSE:
            # The directory is checked as a whole; then each chunk is decoded by itself, from its own sections.
            model, chunks = read_directory(frame, row.elements, row.changed, layout)
            decoder = Decoder(frame, model)
            for chunk in chunks:
                after = None if target is None else target[chunk.begin : chunk.end]
                yield from decoder.pieces(chunk, old[chunk.begin : chunk.end], after)
        else:
            if row.mode == Mode.SMALL_CHANGES:
                blocks = decode_small_changes(old, frame, row.changed, layout)
            else:
                blocks = decode_plain(old, frame, row.mode)
            changes = 0
            for begin, new, indices in blocks:
                changes += indices.size
                if target is not None:
                    np.copyto(target[begin : begin + new.size], new)
                yield begin, new, indices
            if changes != row.changed:
                raise PatchError(f"{changes} changes where the table says {row.changed}")
