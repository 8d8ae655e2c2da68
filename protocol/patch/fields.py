"""The fields of tables and frames: integers and runs of bytes, written to bounded buffers and read from hostile bytes.

A frame's size is not known before it is encoded, and a growing buffer would be copied as it grows. So a buffer reserves
the largest size at once; the operating system provides memory only for the part that is written.
"""

from collections.abc import Iterable

import numpy as np

from protocol.errors import LimitError, MalformedError


def varint(value: int) -> bytes:
    """Encode an integer as unsigned LEB128."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Cursor:
    """A reader of fields in hostile bytes, which errors name as `where`; MalformedError if they end too early."""

    def __init__(self, data: bytes | bytearray | memoryview, where: str, offset: int = 0) -> None:
        self._data = memoryview(data)
        self._where = where
        self.offset = offset

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        end = self.offset + count
        if end > len(self._data):
            raise MalformedError(f"cut off at byte {self.offset}", self._where)
        data = bytes(self._data[self.offset : end])
        self.offset = end
        return data

    def byte(self) -> int:
        """Read the next byte."""
        if self.offset >= len(self._data):
            raise MalformedError(f"cut off at byte {self.offset}", self._where)
        self.offset += 1
        return self._data[self.offset - 1]

    def varint(self, largest: int) -> int:
        """Read unsigned LEB128: LimitError above `largest` or 64 bits, MalformedError if not in shortest form."""
        # The lowest 7 bits come first; the upper bit of a byte says that another one follows.
        byte = self.byte()
        value, shift = byte & 0x7F, 0
        while byte >= 0x80:
            shift += 7
            if shift > 63:
                raise LimitError(f"an integer of more than 64 bits at byte {self.offset}", self._where)
            byte = self.byte()
            value |= (byte & 0x7F) << shift
        # Each integer has one form, so that a patch cannot be changed without another meaning.
        if byte == 0 and shift:
            raise MalformedError(f"an integer that is not in its shortest form at byte {self.offset}", self._where)
        if value > largest:
            raise LimitError(f"{value} where at most {largest} is allowed, at byte {self.offset}", self._where)
        return value

    def finish(self) -> None:
        """Raise MalformedError unless all bytes were read."""
        if self.offset != len(self._data):
            raise MalformedError(f"{len(self._data) - self.offset} bytes behind the end", self._where)


class BufferFullError(Exception):
    """The frame would exceed its maximum size. This is no fault: the encoder then uses another mode."""


class BoundedBuffer:
    """A buffer of at most `capacity` bytes, filled from the front; `size` bytes are in it."""

    def __init__(self, capacity: int) -> None:
        # Not touched here: pages that are never written take no memory.
        self._buffer = np.empty(max(0, capacity), np.uint8)
        self.size = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes; raise BufferFullError if they do not fit."""
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
    frame = BoundedBuffer(max_bytes)
    for piece in pieces:
        frame.put(piece)
    return frame.frame()
