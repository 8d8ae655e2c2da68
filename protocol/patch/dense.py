"""Dense frames: planes of bytes, each element's most significant byte first, in one zstd frame (docs/spec/patch.md, section 4).

Step planes hold the zigzag of the step from the previous value, modulo the dtype's width, so small updates leave the upper
planes zero. Value planes hold the new bit patterns themselves, for tensors that the previous values say nothing about.
"""

import numpy as np

from protocol.compression import compress, decompress
from protocol.errors import MalformedError, PatchError
from protocol.patch.container import Mode
from protocol.patch.values import Bits, Layout, ordered, unordered


def _zigzag(steps: Bits, bits: int) -> Bits:
    one = steps.dtype.type(1)
    negative = (steps >> steps.dtype.type(bits - 1)).astype(steps.dtype)
    return (steps << one) ^ (steps.dtype.type(0) - negative)


def _unzigzag(values: Bits) -> Bits:
    one = values.dtype.type(1)
    return (values >> one) ^ (values.dtype.type(0) - (values & one))


def _to_planes(values: Bits) -> bytes:
    big_endian = values.astype(values.dtype.newbyteorder(">"))
    return np.ascontiguousarray(big_endian.view(np.uint8).reshape(values.size, -1).T).tobytes()


def _from_planes(data: bytes, like: Bits) -> Bits:
    planes = np.frombuffer(data, np.uint8).reshape(like.itemsize, like.size)
    packed = np.ascontiguousarray(planes.T).reshape(-1)
    return packed.view(like.dtype.newbyteorder(">")).astype(like.dtype)


def encode_dense(old: Bits, new: Bits, layout: Layout, mode: Mode, level: int = 1) -> bytes:
    """A dense frame of the given mode."""
    if mode == Mode.STORED:
        return new.tobytes()
    if mode == Mode.VALUE_PLANES:
        return compress(_to_planes(new), level)
    steps = ordered(new, layout) - ordered(old, layout)
    return compress(_to_planes(_zigzag(steps, layout.bits)), level)


def decode_dense(old: Bits, frame: bytes, layout: Layout, mode: Mode) -> Bits:
    """The new bit patterns of a dense frame.

    Raises:
        PatchError: a size that is not the tensor's.
        MalformedError: not a zstd frame.
    """
    if mode == Mode.STORED:
        if len(frame) != old.nbytes:
            raise PatchError(f"{len(frame)} bytes stored for a tensor of {old.nbytes}")
        return np.frombuffer(frame, old.dtype).copy()
    planes = decompress(frame, old.nbytes)
    if len(planes) != old.nbytes:
        raise PatchError(f"planes of {len(planes)} bytes for a tensor of {old.nbytes}")
    values = _from_planes(planes, old)
    if mode == Mode.VALUE_PLANES:
        return values
    if mode != Mode.STEP_PLANES:
        raise MalformedError(f"{mode.name} is not a dense mode")
    return unordered(ordered(old, layout) + _unzigzag(values), layout)
