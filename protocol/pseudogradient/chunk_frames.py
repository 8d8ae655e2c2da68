"""SparseLoCo's frames: quantized values of the largest entries (docs/spec/pseudogradient.md, section 6)."""

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError, MalformedError
from protocol.patch.entropy_decoding import reasons
from protocol.patch.fields import Cursor, varint
from protocol.pseudogradient.arithmetic import Floats
from protocol.pseudogradient.chunks import LEVELS, Blocks, blocks_of, join_chunks, select, split_chunks
from protocol.pseudogradient.subsets import CHUNK, MAX_NODES, MIN_STATE, put_symbols, slot_tables

SEGMENT_CHUNKS: Final = 256
"""Chunks that share a stream of words."""

SIGMAS: Final = 6.0
"""The four bins of the quantizer together are so many standard deviations wide."""

_WHERE: Final = "chunked frame"


def entries_of(blocks: Blocks, chosen: int) -> int:
    """Return how many entries of a tensor are sent."""
    # At most four sizes of chunks: whole ones, and those at the lower edge, at the right edge and in the corner.
    heights = [min(blocks.height, blocks.rows - top) for top in range(0, blocks.rows, blocks.height)]
    widths = [min(blocks.width, blocks.columns - left) for left in range(0, blocks.columns, blocks.width)]
    sizes: dict[int, int] = {}
    for height in set(heights):
        for width in set(widths):
            sizes[height * width] = sizes.get(height * width, 0) + heights.count(height) * widths.count(width)
    return sum(count * max(1, chosen * size // CHUNK) for size, count in sizes.items())


def quantize(values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Quantize values to four levels, as SparseLoCo's published implementation does.

    The bins have a width of 6/4 standard deviations; the third is centred on the mean, and the outer ones are open. A
    level's value is the mean of its bin's values.

    Returns:
        The level of each value: uint8 [n], and the value of each level: float32[LEVELS].
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
    """Encode a part.

    Args:
        update: the part, flat: float32 [n]; what is sent is subtracted from it.
        shapes: of the part's tensors, in their order.
        chosen: entries of a whole chunk.
        sent: result: what is sent, flat: float32 [n]; zeros before.

    Returns:
        The number of entries, and the frame.
    """
    entries, begin, pieces = 0, 0, []
    sent = np.zeros_like(update) if sent is None else sent
    for shape in shapes:
        size = prod(shape)
        if size:
            end = begin + size
            count, frame = _encode_tensor(update[begin:end], blocks_of(shape), chosen, sent[begin:end])
            entries += count
            pieces.append(frame)
        begin += size
    return entries, b"".join(pieces)


def _encode_tensor(update: Floats, blocks: Blocks, chosen: int, sent: Floats) -> tuple[int, bytes]:
    tables, entries = slot_tables(chosen), entries_of(blocks, chosen)
    bitmaps, values = np.zeros((blocks.count, CHUNK // 64), np.uint64), np.empty(entries, np.float32)
    # The levels are fitted to the values of the whole tensor, so all chunks are chosen before the first is coded.
    select(update, blocks.bounds(0, blocks.count), chosen, np.empty(CHUNK, np.uint32), bitmaps, values)
    levels, lookup = quantize(values)
    pieces = [lookup.astype("<f4").tobytes()]
    done = np.zeros(1, np.int64)
    scratch = np.empty(CHUNK // 64 + 1, np.int64), np.empty(2 * MAX_NODES, np.uint64)
    # A chosen element takes at most a symbol at each of 12 levels, or fewer and then 12 raw bits; and 2 bits of level.
    most = min(blocks.count, SEGMENT_CHUNKS)
    codes = np.empty((most * 12 * chosen, 2), np.uint32)
    raw = np.empty(most * chosen * 14 // 32 + 4, np.uint32)
    for bounds in _segments(blocks):
        filled = np.zeros(3, np.uint64)
        inputs = (update, sent, bounds, chosen, (tables.offsets, tables.slots), (bitmaps, levels, lookup))
        symbols = split_chunks(*inputs, scratch, codes, (raw, filled), done)
        out = np.empty(symbols + 2, np.uint32)
        # rANS is last in, first out: the last symbol is coded first and words are written from the end, so that the
        # decoder reads forwards.
        words = out[put_symbols(codes[:symbols], out) :].astype("<u4").tobytes()
        position, pending, fill = (int(number) for number in filled)
        raw[position] = pending
        bits = raw[: position + 1].astype("<u4").tobytes()[: (32 * position + fill + 7) // 8]
        pieces += [varint(len(words) // 4), varint(len(bits)), words, bits]
    return entries, b"".join(pieces)


def decode_chunks(frame: memoryview, shapes: Sequence[Sequence[int]], chosen: int) -> Floats:
    """Decode a part from hostile bytes, the inverse of `encode_chunks`: float32 [n], zeros where nothing was sent."""
    out = np.zeros(sum(map(prod, shapes)), np.float32)
    cursor, begin = Cursor(frame, _WHERE), 0
    for shape in shapes:
        size = prod(shape)
        if size:
            _decode_tensor(cursor, blocks_of(shape), chosen, out[begin : begin + size])
        begin += size
    cursor.finish()
    return out


def _decode_tensor(cursor: Cursor, blocks: Blocks, chosen: int, out: Floats) -> None:
    lookup = np.array(struct.unpack(f"<{LEVELS}f", cursor.take(4 * LEVELS)), np.float32)
    if not np.isfinite(lookup).all():
        raise ContributionError("a level that is not finite", _WHERE)
    tables = slot_tables(chosen)
    scratch = np.empty(2 * MAX_NODES, np.uint64), np.empty(CHUNK // 64, np.uint64)
    for bounds in _segments(blocks):
        # The lengths are bounded by what an encoder could need, before the bytes are copied.
        most = int(bounds[5] - bounds[4]) * chosen
        count, length = cursor.varint(12 * most + 2), cursor.varint(2 * most + 8)
        if count < 2:
            raise MalformedError("a stream without a state", _WHERE)
        sections = cursor.take(4 * count), cursor.take(length)
        # One word and two integers more: the kernel reads ahead of its checks.
        words, raw = np.zeros(count + 1, np.uint32), np.zeros(length + -length % 4 + 8, np.uint8)
        words[:count] = np.frombuffer(sections[0], "<u4")
        raw[:length] = np.frombuffer(sections[1], np.uint8)
        state = np.array((int(words[0]) << 32 | int(words[1]), 2, 0), np.uint64)
        # The encoder's last state, which is the decoder's first, is at least the one that it began with.
        if state[0] < MIN_STATE:
            raise MalformedError("a state that no encoder writes", _WHERE)
        arrays = words, raw.view("<u4").astype(np.uint32)
        slots = tables.offsets, tables.slots
        status = join_chunks(bounds, chosen, slots, lookup, scratch, arrays, state, out)
        if status:
            raise ContributionError(reasons[status], _WHERE)
        _check_end(state, count, raw[:length])


def _check_end(state: NDArray[np.uint64], words: int, raw: NDArray[np.uint8]) -> None:
    """Check that a stream ends in the state in which its encoder began, with nothing left over."""
    bits = int(state[2])
    if int(state[0]) != MIN_STATE or int(state[1]) != words or (bits + 7) // 8 != raw.size:
        raise MalformedError("a stream that ends too early or too late", _WHERE)
    if bits % 8 and int(raw[-1]) >> (bits % 8):
        raise MalformedError("bits behind the last value", _WHERE)
