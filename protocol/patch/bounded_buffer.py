"""Frames of a length that is not known before they are written: a buffer that grows would be copied, or held twice, as
it does.

Memory of the most that a frame may take is reserved; only what is written to ever becomes resident.
"""

from collections.abc import Iterable

import numpy as np


class OutOfRoomError(Exception):
    """Our own: the frame would be longer than it may be; the tensor is better sent in another way."""


class BoundedBuffer:
    """Room for `size` bytes, filled from the front."""

    def __init__(self, size: int) -> None:
        self._buffer = np.empty(max(0, size), np.uint8)
        self.used = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append.

        Raises:
            OutOfRoomError: there is no room for it.
        """
        end = self.used + len(data)
        if end > self._buffer.size:
            raise OutOfRoomError
        self._buffer[self.used : end] = np.frombuffer(data, np.uint8)
        self.used = end

    def frame(self, head: bytes | bytearray = b"", begin: int = 0) -> memoryview:
        """What was put from `begin` on, with `head` written before it, over the bytes that lie there."""
        start = begin - len(head)
        self._buffer[start:begin] = np.frombuffer(head, np.uint8)
        return self._buffer[start : self.used].data


def gather(pieces: Iterable[bytes], room: int) -> memoryview:
    """All pieces in one.

    Raises:
        OutOfRoomError: they are more than `room` bytes.
    """
    frame = BoundedBuffer(room)
    for piece in pieces:
        frame.put(piece)
    return frame.frame()
