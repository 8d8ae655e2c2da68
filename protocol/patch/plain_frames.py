"""Frames without a coder of our own: small changes, planes, raw elements (docs/spec/patch.md, section 4).

A frame of small changes has the gap and the step of each of a few changes, without the cost of a model.

A frame of planes has planes of bytes, each element's most significant byte first, in one zstd frame. XOR planes contain
the bits that differ, for changes that are no steps (a flipped sign). Value planes contain the new bit patterns, for
tensors that do not resemble their previous values. Raw elements are no smaller than the tensor, and always fit.

All work goes block by block: in addition to the frame, an encoder needs the memory of one block, a decoder that of the
planes and one block.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from protocol.compression import decompress
from protocol.errors import MalformedError, PatchError
from protocol.patch.container import Mode
from protocol.patch.fields import Cursor, gather, varint
from protocol.patch.values import Bits, Decoded, Layout, from_keys, to_keys

BLOCK_ELEMENTS: Final = 1 << 16

MAX_SMALL_CHANGES: Final = 32
"""Changed elements of a small-change frame."""
_WHERE: Final = "small-change frame"


def find_small_changes(old: Bits, new: Bits) -> NDArray[np.int64] | None:
    """Return the indices of all changed elements, ascending, or None if there are more than MAX_SMALL_CHANGES."""
    blocks: list[NDArray[np.int64]] = []
    count = 0
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        differs = old[block] != new[block]
        if differs.any():
            blocks.append(np.flatnonzero(differs) + begin)
            count += blocks[-1].size
            if count > MAX_SMALL_CHANGES:
                return None
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)


def count_changes(old: Bits, new: Bits) -> int:
    """Count the changed elements of a tensor, with the memory of one block."""
    blocks = (slice(begin, begin + BLOCK_ELEMENTS) for begin in range(0, old.size, BLOCK_ELEMENTS))
    return sum(int(np.count_nonzero(old[block] != new[block])) for block in blocks)


def encode_small_changes(old: Bits, new: Bits, places: NDArray[np.int64], layout: Layout, below: int) -> memoryview:
    """Encode the frame of the changes at `places`, which ascend; it must stay below so many bytes."""
    # Gaps before the changes, and steps with their sign in the lowest bit: small numbers take one byte.
    gaps = np.diff(places, prepend=-1) - 1
    steps = to_keys(new[places], layout).astype(np.int64) - to_keys(old[places], layout).astype(np.int64)
    zigzags = np.where(steps < 0, -2 * steps - 1, 2 * steps)
    pairs = zip(gaps.tolist(), zigzags.tolist(), strict=True)
    return gather((varint(number) for pair in pairs for number in pair), below - 1)


def _read(
    frame: memoryview, elements: int, changes: int, layout: Layout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices and the steps of the changes."""
    if changes > MAX_SMALL_CHANGES:
        raise MalformedError(f"{changes} changes where at most {MAX_SMALL_CHANGES} are allowed", _WHERE)
    # Each gap leads forwards, so no place occurs twice.
    cursor = Cursor(frame, _WHERE)
    places, steps, place = [], [], -1
    for _ in range(changes):
        place += 1 + cursor.varint(elements)
        if place >= elements:
            raise PatchError("a gap past the end", _WHERE)
        # A key has `bits` bits, so a step between two of them has a sign more.
        zigzag = cursor.varint((1 << (layout.bits + 1)) - 1)
        if not zigzag:
            raise PatchError("a step of size 0", _WHERE)
        places.append(place)
        steps.append(-(zigzag + 1 >> 1) if zigzag & 1 else zigzag >> 1)
    cursor.finish()
    return np.array(places, np.int64), np.array(steps, np.int64)


def decode_small_changes(old: Bits, frame: memoryview, changes: int, layout: Layout) -> Iterator[Decoded]:
    """Decode hostile bytes, which have as many changes as the table says: yield the new elements of a flat tensor and
    the indices of the changed ones, block by block. A ProtocolError says where the frame breaks docs/spec/patch.md.
    """
    places, steps = _read(frame, old.size, changes, layout)
    keys = to_keys(old[places], layout).astype(np.int64) + steps
    # Keys are compared as 64-bit integers, before they are cut to the width of the dtype.
    if ((keys < 0) | (keys >> layout.bits != 0)).any():
        raise PatchError("a step out of the dtype", _WHERE)
    elements = from_keys(keys.astype(old.dtype), layout)
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block: Bits = old[begin : begin + BLOCK_ELEMENTS].copy()
        inside = (places >= begin) & (places < begin + BLOCK_ELEMENTS)
        block[places[inside] - begin] = elements[inside]
        yield begin, block, places[inside] - begin


ONE_SHOT_BYTES: Final = 1 << 22
"""Planes of at most so many bytes are compressed in one call: a stream ends with an empty block of 3 bytes."""

PLANES: Final = (Mode.XOR_PLANES, Mode.VALUE_PLANES)


def _planes(old: Bits, new: Bits, mode: Mode) -> Iterator[bytes]:
    """Yield the planes of a mode in pieces; to save memory, the elements are computed again for each plane."""
    for plane in range(old.itemsize):
        shift = old.dtype.type(8 * (old.itemsize - 1 - plane))
        for begin in range(0, old.size, BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            elements = new[block] if mode == Mode.VALUE_PLANES else old[block] ^ new[block]
            yield (elements >> shift).astype(np.uint8).tobytes()


def encode_planes(old: Bits, new: Bits, mode: Mode, *, level: int, below: int) -> memoryview:
    """Encode a frame of planes, with this level of zstd; it must stay below so many bytes."""
    return gather(_compress(_planes(old, new, mode), level, old.nbytes), below - 1)


def encode_raw(new: Bits) -> memoryview:
    """Encode a frame of the new elements themselves."""
    return new.astype(new.dtype.newbyteorder("<")).data.cast("B")


def _compress(pieces: Iterator[bytes], level: int, nbytes: int) -> Iterator[bytes]:
    # The size in the frame's header lets a decoder refuse a frame of another size before it decompresses it.
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    if nbytes <= ONE_SHOT_BYTES:
        yield compressor.compress(b"".join(pieces))
        return
    engine = compressor.compressobj(size=nbytes)
    yield from map(engine.compress, pieces)
    yield engine.flush()


def decode_plain(old: Bits, frame: memoryview, mode: Mode) -> Iterator[Decoded]:
    """Decode hostile bytes, planes or raw elements: yield the new elements of a flat tensor and the indices of the
    changed ones, block by block. A ProtocolError says that they have not the tensor's size.
    """
    if mode not in (*PLANES, Mode.RAW):
        raise MalformedError(f"{mode.name} is not a mode of planes")
    # The tensor's size is known, so no frame makes the decoder reserve more.
    data = frame if mode == Mode.RAW else decompress(frame, old.nbytes)
    if len(data) != old.nbytes:
        raise PatchError(f"{len(data)} bytes for a tensor of {old.nbytes}")
    big, little = old.dtype.newbyteorder(">"), old.dtype.newbyteorder("<")
    planes = np.frombuffer(data, np.uint8).reshape(old.itemsize, -1)
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        if mode == Mode.RAW:
            new = np.frombuffer(data, little)[block].astype(old.dtype)
        else:
            # The planes of a block side by side are its elements, most significant byte first.
            new = np.ascontiguousarray(planes[:, block].T).reshape(-1).view(big).astype(old.dtype)
        if mode == Mode.XOR_PLANES:
            new ^= old[block]
        yield begin, new, np.flatnonzero(old[block] != new)
