"""A buffer of bounded size, for frames whose size is not known before they are encoded.

A growing buffer would be copied as it grows. This one reserves the largest size at once; the operating system provides
memory only for the part that is written.
"""

from collections.abc import Iterable

import numpy as np


class BufferFullError(Exception):
    """The frame would exceed its maximum size. This is no fault: the encoder then uses another mode."""


class BoundedBuffer:
    """A buffer of at most `capacity` bytes, filled from the front.

    Attributes:
        size: bytes in the buffer.
    """

    def __init__(self, capacity: int) -> None:
        self._buffer = np.empty(max(0, capacity), np.uint8)
        self.size = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            BufferFullError: they do not fit.
        """
        end = self.size + len(data)
        if end > self._buffer.size:
            raise BufferFullError
        self._buffer[self.size : end] = np.frombuffer(data, np.uint8)
        self.size = end

    def frame(self, head: bytes | bytearray = b"", begin: int = 0) -> memoryview:
        """Return `head` and the contents from offset `begin` on; `head` overwrites the bytes just before it."""
        start = begin - len(head)
        self._buffer[start:begin] = np.frombuffer(head, np.uint8)
        return self._buffer[start : self.size].data


def gather(pieces: Iterable[bytes], max_bytes: int) -> memoryview:
    """Concatenate pieces."""
    frame = BoundedBuffer(max_bytes)
    for piece in pieces:
        frame.put(piece)
    return frame.frame()
