"""SparseLoCo's frames: quantized values of the largest entries (docs/spec/pseudogradient.md, section 6)."""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError, MalformedError
from protocol.patch.context_model import Statistics, read_model, write_model
from protocol.patch.entropy_decoding import reasons
from protocol.patch.entropy_encoding import GROUPS, tally
from protocol.patch.fields import Cursor, varint
from protocol.patch.sparse import CHUNK_ELEMENTS, Scratch
from protocol.pseudogradient.arithmetic import Floats
from protocol.pseudogradient.chunks import (
    CHUNK,
    LEVELS,
    Blocks,
    blocks_of,
    count_entries,
    list_chunks,
    place_chunks,
    select,
)
from protocol.pseudogradient.sparse_decoding import decode_entries, read_lengths
from protocol.pseudogradient.sparse_encoding import LAYOUT, code_entries

SEGMENT_CHUNKS: Final = CHUNK_ELEMENTS // CHUNK
"""Chunks that share a model and a stream of words."""

SIGMAS: Final = 6.0
"""The four bins of the quantizer together are so many standard deviations wide."""

_WHERE: Final = "chunked frame"


def entries_of(blocks: Blocks, chosen: int) -> int:
    """Return how many entries of a tensor are sent."""
    return int(count_entries(blocks.bounds(0, blocks.count), chosen))


def quantize(values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Quantize values to four levels, as SparseLoCo's published implementation does; return the level of each value,
    uint8 [n], and the value of each level, float32[LEVELS].

    The bins have a width of 6/4 standard deviations; the third is centred on the mean, and the outer ones are open. A
    level's value is the mean of its bin's values.
    """
    # Only the encoder computes this. The frame has the values of the levels, so no other machine must agree.
    mean = float(values.mean(dtype=np.float64))
    deviation = float(values.std(dtype=np.float64, ddof=1)) if values.size > 1 else 0.0
    scale = SIGMAS * deviation / LEVELS or 1.0
    levels = np.clip(np.rint((values - np.float64(mean)) / scale) + LEVELS // 2, 0, LEVELS - 1).astype(np.uint8)
    sums = np.bincount(levels, values.astype(np.float64), LEVELS)
    return levels, (sums / np.maximum(1, np.bincount(levels, minlength=LEVELS))).astype(np.float32)


def _segments(blocks: Blocks) -> Iterator[NDArray[np.int64]]:
    """Yield the bounds of each segment (see `Blocks.bounds`)."""
    for begin in range(0, blocks.count, SEGMENT_CHUNKS):
        yield blocks.bounds(begin, min(begin + SEGMENT_CHUNKS, blocks.count))


def encode_chunks(
    update: Floats, shapes: Sequence[Sequence[int]], chosen: int, sent: Floats | None = None
) -> tuple[int, bytes]:
    """Encode a part, float32 [n], of tensors with these shapes; return the number of entries, and the frame. What is
    sent is subtracted from the part, and written to `sent`, zeros before. `chosen` are the entries of a whole chunk.
    """
    entries, begin, pieces, scratch = 0, 0, list[bytes](), Scratch()
    sent = np.zeros_like(update) if sent is None else sent
    for shape in shapes:
        size = prod(shape)
        if size:
            end = begin + size
            tensor = update[begin:end], sent[begin:end]
            entries += _encode_tensor(*tensor, blocks_of(shape), chosen, scratch, pieces)
        begin += size
    return entries, b"".join(pieces)


def _encode_tensor(
    update: Floats, sent: Floats, blocks: Blocks, chosen: int, scratch: Scratch, pieces: list[bytes]
) -> int:
    """Append the pieces of a tensor's frame; return the number of its entries."""
    entries = entries_of(blocks, chosen)
    bitmaps, values = np.zeros((blocks.count, CHUNK // 64), np.uint64), np.empty(entries, np.float32)
    # The levels are fitted to the values of the whole tensor, so all chunks are chosen before the first is coded.
    select(update, blocks.bounds(0, blocks.count), chosen, np.empty(CHUNK, np.uint32), bitmaps, values)
    levels, lookup = quantize(values)
    pieces.append(lookup.astype("<f4").tobytes())
    changes, done = np.empty(min(entries, SEGMENT_CHUNKS * chosen), np.uint64), 0
    for bounds in _segments(blocks):
        counts, statistics = np.zeros(GROUPS, np.int64), Statistics()
        count = counts[0] = list_chunks(update, sent, bounds, (bitmaps, levels[done:], lookup), changes)
        tally(changes, count, statistics.elements, statistics.steps)
        model = statistics.model(LAYOUT, 0, 0)
        words, raw = code_entries(changes[:count], counts, model, scratch)
        pieces += [write_model(model), varint(len(words) // 2), varint(len(raw)), words, raw]
        done += count
    return entries


def decode_chunks(frame: memoryview, shapes: Sequence[Sequence[int]], chosen: int, out: Floats) -> None:
    """Decode a part from hostile bytes, the inverse of `encode_chunks`: float32 [n], zeros where nothing was sent."""
    out[:] = 0
    cursor, begin = Cursor(frame, _WHERE), 0
    for shape in shapes:
        size = prod(shape)
        if size:
            _decode_tensor(cursor, blocks_of(shape), chosen, out[begin : begin + size])
        begin += size
    cursor.finish()


def _decode_tensor(cursor: Cursor, blocks: Blocks, chosen: int, out: Floats) -> None:
    lookup = np.array(struct.unpack(f"<{LEVELS}f", cursor.take(4 * LEVELS)), np.float32)
    # The levels are the sender's own choice, so nothing else of them can be wrong.
    if not np.isfinite(lookup).all():
        raise ContributionError("a level that is not finite", _WHERE)
    for bounds in _segments(blocks):
        model, counts = read_model(cursor, LAYOUT), np.zeros(GROUPS, np.int64)
        if model.classes:
            raise MalformedError("a chunk with classes", _WHERE)
        # How many entries there are follows from the shape: a frame does not say it.
        counts[0] = count_entries(bounds, chosen)
        changes = decode_entries(cursor, model, counts, read_lengths(cursor, CHUNK_ELEMENTS), CHUNK_ELEMENTS)
        if status := place_chunks(bounds, chosen, changes, lookup, out):
            raise ContributionError(reasons[status], _WHERE)
