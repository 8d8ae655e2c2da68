"""Dense frames: planes of bytes, each element's most significant byte first, in one zstd frame (docs/spec/patch.md,
section 4).

Step planes hold the zigzag of the step from the previous value, modulo the dtype's width, so small updates leave the
upper planes zero; XOR planes the bits that differ, for changes that are no steps (a flipped sign). Value planes hold
the new bit patterns themselves, for tensors that the previous values say nothing about.

Both ways go block by block: beside the frame, an encoder holds no more than a block, a decoder the planes and a block.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard

from protocol.compression import decompress
from protocol.errors import MalformedError, PatchError
from protocol.patch.bounded_buffer import gather
from protocol.patch.container import Mode
from protocol.patch.values import Bits, Layout, ordered, unordered

BLOCK_ELEMENTS: Final = 1 << 16

WHOLE_BYTES: Final = 1 << 22
"""Planes of so many bytes are compressed in one go: a stream that is fed block by block ends in an empty one of 3
bytes.
"""

DENSE_MODES: Final = (Mode.STEP_PLANES, Mode.XOR_PLANES, Mode.VALUE_PLANES, Mode.STORED)


def _zigzag(steps: Bits, bits: int) -> Bits:
    one, top = steps.dtype.type(1), steps.dtype.type(bits - 1)
    doubled: Bits = (steps << one) ^ (steps.dtype.type(0) - (steps >> top))
    return doubled


def _unzigzag(values: Bits) -> Bits:
    one = values.dtype.type(1)
    steps: Bits = (values >> one) ^ (values.dtype.type(0) - (values & one))
    return steps


def _sent(old: Bits, new: Bits, layout: Layout, mode: Mode) -> Bits:
    """What a dense mode sends of each element."""
    if mode == Mode.VALUE_PLANES:
        return new
    if mode == Mode.XOR_PLANES:
        return old ^ new
    return _zigzag(ordered(new, layout) - ordered(old, layout), layout.bits)


def _planes(old: Bits, new: Bits, layout: Layout, mode: Mode) -> Iterator[bytes]:
    """The planes that a dense mode sends, in pieces; elements are computed again for each plane rather than kept."""
    for plane in range(old.itemsize):
        down = old.dtype.type(8 * (old.itemsize - 1 - plane))
        for begin in range(0, old.size, BLOCK_ELEMENTS):
            block = slice(begin, begin + BLOCK_ELEMENTS)
            yield (_sent(old[block], new[block], layout, mode) >> down).astype(np.uint8).tobytes()


def encode_dense(old: Bits, new: Bits, layout: Layout, mode: Mode, *, level: int, below: int) -> memoryview:
    """A dense frame of the given mode.

    Raises:
        OutOfRoomError: it would take `below` bytes or more.
    """
    return gather(_compressed(_planes(old, new, layout, mode), level, old.nbytes), below - 1)


def store(old: Bits, new: Bits, layout: Layout) -> memoryview:
    """A STORED frame: step planes without compression."""
    return gather(_planes(old, new, layout, Mode.STORED), old.nbytes)


def _compressed(pieces: Iterator[bytes], level: int, nbytes: int) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    if nbytes <= WHOLE_BYTES:
        yield compressor.compress(b"".join(pieces))
        return
    engine = compressor.compressobj(size=nbytes)
    yield from map(engine.compress, pieces)
    yield engine.flush()


def decode_dense(
    old: Bits,
    frame: memoryview,
    layout: Layout,
    mode: Mode,
    *,
    back: bool = False,
    first: int = 0,
    of: int | None = None,
) -> Iterator[tuple[int, Bits]]:
    """The new bit patterns of a dense frame; when `back`, the older patterns from the newer ones.

    Args:
        old: the elements from `first` on, of a tensor of `of` elements; by default all of it.

    Yields:
        The offset of a block in `old`, and its patterns.

    Raises:
        PatchError: a size that is not the tensor's; value planes when `back`: they do not tell the older values.
        MalformedError: not a zstd frame.
    """
    if mode not in DENSE_MODES:
        raise MalformedError(f"{mode.name} is not a dense mode")
    if back and mode == Mode.VALUE_PLANES:
        raise PatchError("sent whole, so the patch does not tell its older values; get these from an older anchor")
    nbytes = old.itemsize * (old.size if of is None else of)
    data = frame if mode == Mode.STORED else decompress(frame, nbytes)
    if len(data) != nbytes:
        raise PatchError(f"planes of {len(data)} bytes for a tensor of {nbytes}")
    planes = np.frombuffer(data, np.uint8).reshape(old.itemsize, -1)[:, first : first + old.size]
    for begin in range(0, old.size, BLOCK_ELEMENTS):
        block = slice(begin, begin + BLOCK_ELEMENTS)
        packed = np.ascontiguousarray(planes[:, block].T).reshape(-1)
        sent: Bits = packed.view(old.dtype.newbyteorder(">")).astype(old.dtype)
        yield begin, _received(old[block], sent, layout, mode, back)


def _received(old: Bits, sent: Bits, layout: Layout, mode: Mode, back: bool) -> Bits:
    """The mirror of `_sent`."""
    if mode == Mode.VALUE_PLANES:
        return sent
    if mode == Mode.XOR_PLANES:
        return old ^ sent
    steps = _unzigzag(sent)
    return unordered(ordered(old, layout) - steps if back else ordered(old, layout) + steps, layout)
