"""Dense frames: planes of bytes, each element's most significant byte first, in one zstd frame (docs/spec/patch.md,
section 4).

Step planes contain the zigzag of the step from the previous value, modulo the dtype's width, so that small updates
leave the upper planes zero. XOR planes contain the bits that differ, for changes that are no steps (a flipped sign).
Value planes contain the new bit patterns, for tensors that do not resemble their previous values.

Both directions work block by block: in addition to the frame, an encoder needs the memory of one block, a decoder that
of the planes and one block.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard

from protocol.compression import decompress
from protocol.errors import MalformedError, PatchError
from protocol.patch.bounded_buffer import gather
from protocol.patch.container import Mode
from protocol.patch.values import Bits, Layout, from_keys, to_keys

BLOCK_ELEMENTS: Final = 1 << 16

ONE_SHOT_BYTES: Final = 1 << 22
"""Planes of at most so many bytes are compressed in one call: a stream ends with an empty block of 3 bytes."""

DENSE_MODES: Final = (Mode.STEP_PLANES, Mode.XOR_PLANES, Mode.VALUE_PLANES, Mode.RAW_STEP_PLANES)


def _zigzag(steps: Bits, bits: int) -> Bits:
    one, top = steps.dtype.type(1), steps.dtype.type(bits - 1)
    doubled: Bits = (steps << one) ^ (steps.dtype.type(0) - (steps >> top))
    return doubled


def _unzigzag(values: Bits) -> Bits:
    one = values.dtype.type(1)
    steps: Bits = (values >> one) ^ (values.dtype.type(0) - (values & one))
    return steps


def _to_payload(old: Bits, new: Bits, layout: Layout, mode: Mode) -> Bits:
    """Return the integer that a dense mode sends for each element."""
    if mode == Mode.VALUE_PLANES:
        return new
    if mode == Mode.XOR_PLANES:
        return old ^ new
    return _zigzag(to_keys(new, layout) - to_keys(old, layout), layout.bits)


def _planes(old: Bits, new: Bits, layout: Layout, mode: Mode) -> Iterator[bytes]:
    """Yield the planes of a dense mode in pieces; to save memory, the elements are computed again for each plane."""
    for plane in range(old.itemsize):
        shift = old.dtype.type(8 * (old.itemsize - 1 - plane))
        for begin in range(0, old.size, BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            yield (_to_payload(old[block], new[block], layout, mode) >> shift).astype(np.uint8).tobytes()


def encode_dense(old: Bits, new: Bits, layout: Layout, mode: Mode, *, level: int, below: int) -> memoryview:
    """Encode a dense frame of the given mode.

    Args:
        old, new: the previous and the new elements, flat.
        level: of zstd.
        below: size that the frame must stay below, in bytes.
    """
    return gather(_compress(_planes(old, new, layout, mode), level, old.nbytes), below - 1)


def encode_raw(old: Bits, new: Bits, layout: Layout) -> memoryview:
    """Encode a frame of step planes without compression, which is as large as the tensor."""
    return gather(_planes(old, new, layout, Mode.RAW_STEP_PLANES), old.nbytes)


def _compress(pieces: Iterator[bytes], level: int, nbytes: int) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    if nbytes <= ONE_SHOT_BYTES:
        yield compressor.compress(b"".join(pieces))
        return
    engine = compressor.compressobj(size=nbytes)
    yield from map(engine.compress, pieces)
    yield engine.flush()


def decode_dense(old: Bits, frame: memoryview, layout: Layout, mode: Mode) -> Iterator[tuple[int, Bits]]:
    """Yield the new bit patterns of a tensor, block by block.

    Args:
        old: the previous elements, flat.
        frame: hostile bytes.

    Yields:
        The offset of a block in `old`, and its bit patterns.

    Raises:
        PatchError: the planes do not have the tensor's size.
        MalformedError, LimitError: the frame is no zstd frame of that size.
    """
    if mode not in DENSE_MODES:
        raise MalformedError(f"{mode.name} is not a dense mode")
    data = frame if mode == Mode.RAW_STEP_PLANES else decompress(frame, old.nbytes)
    if len(data) != old.nbytes:
        raise PatchError(f"planes of {len(data)} bytes for a tensor of {old.nbytes}")
    planes = np.frombuffer(data, np.uint8).reshape(old.itemsize, -1)
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        packed = np.ascontiguousarray(planes[:, block].T).reshape(-1)
        payload: Bits = packed.view(old.dtype.newbyteorder(">")).astype(old.dtype)
        yield begin, _from_payload(old[block], payload, layout, mode)


def _from_payload(old: Bits, payload: Bits, layout: Layout, mode: Mode) -> Bits:
    """Return the new bit patterns, as the inverse of `_to_payload`."""
    if mode == Mode.VALUE_PLANES:
        return payload
    if mode == Mode.XOR_PLANES:
        return old ^ payload
    return from_keys(to_keys(old, layout) + _unzigzag(payload), layout)
