"""Dense frames: planes of bytes, each element's most significant byte first, in one zstd frame (docs/spec/patch.md, section 4).

Step planes hold the zigzag of the step from the previous value, modulo the dtype's width, so small updates leave the upper
planes zero; XOR planes the bits that differ, for changes that are no steps (a flipped sign). Value planes hold the new bit
patterns themselves, for tensors that the previous values say nothing about.
"""

import numpy as np

from protocol.compression import compress, decompress
from protocol.errors import MalformedError, PatchError
from protocol.patch.container import Mode
from protocol.patch.values import Bits, Layout, ordered, unordered


def _zigzag(steps: Bits, bits: int) -> Bits:
    one, top = steps.dtype.type(1), steps.dtype.type(bits - 1)
    doubled: Bits = (steps << one) ^ (steps.dtype.type(0) - (steps >> top))
    return doubled


def _unzigzag(values: Bits) -> Bits:
    one = values.dtype.type(1)
    steps: Bits = (values >> one) ^ (values.dtype.type(0) - (values & one))
    return steps


def _to_planes(values: Bits) -> bytes:
    big_endian = values.astype(values.dtype.newbyteorder(">"))
    return np.ascontiguousarray(big_endian.view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def _from_planes(data: bytes, like: Bits, first: int) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(like.itemsize, -1)[:, first : first + like.size]
    packed = np.ascontiguousarray(planes.T).reshape(-1)
    return packed.view(like.dtype.newbyteorder(">")).astype(like.dtype)


def planes_of(old: Bits, new: Bits, layout: Layout, mode: Mode) -> bytes:
    """The planes that a dense mode sends, before compression."""
    if mode == Mode.VALUE_PLANES:
        return _to_planes(new)
    if mode == Mode.XOR_PLANES:
        return _to_planes(old ^ new)
    return _to_planes(_zigzag(ordered(new, layout) - ordered(old, layout), layout.bits))


def encode_dense(old: Bits, new: Bits, layout: Layout, mode: Mode, level: int) -> bytes:
    """A dense frame of the given mode; STORED is step planes without compression."""
    planes = planes_of(old, new, layout, mode)
    return planes if mode == Mode.STORED else compress(planes, level)


def decode_dense(
    old: Bits, frame: bytes, layout: Layout, mode: Mode, *, back: bool = False, first: int = 0, of: int | None = None
) -> Bits:
    """The new bit patterns of a dense frame; when `back`, the older patterns from the newer ones.

    Args:
        old: the elements from `first` on, of a tensor of `of` elements; by default all of it.

    Raises:
        PatchError: a size that is not the tensor's; value planes when `back`: they do not tell the older values.
        MalformedError: not a zstd frame.
    """
    if mode not in (Mode.STORED, Mode.STEP_PLANES, Mode.XOR_PLANES, Mode.VALUE_PLANES):
        raise MalformedError(f"{mode.name} is not a dense mode")
    nbytes = old.itemsize * (old.size if of is None else of)
    planes = frame if mode == Mode.STORED else decompress(frame, nbytes)
    if len(planes) != nbytes:
        raise PatchError(f"planes of {len(planes)} bytes for a tensor of {nbytes}")
    values = _from_planes(planes, old, first)
    if mode == Mode.XOR_PLANES:
        return old ^ values
    if mode != Mode.VALUE_PLANES:
        steps = _unzigzag(values)
        return unordered(ordered(old, layout) - steps if back else ordered(old, layout) + steps, layout)
    if back:
        raise PatchError("a tensor that was sent whole: the patch does not tell its older values")
    return values
