"""Patches whose tables and frames are written byte by byte, as a hostile encoder could."""

from protocol.compression import compress
from protocol.patch.container import PREAMBLE
from protocol.patch.fields import varint


def row(name: bytes, elements: int, mode: int = 1, changes: int = 1, size: int = 0) -> bytes:
    """Return the row of a BF16 tensor with one dimension; mode 0 is that of an unchanged tensor."""
    head = varint(len(name)) + name + bytes((0, 1)) + varint(elements) + bytes((mode,))
    return head if mode == 0 else head + varint(changes) + varint(size) + bytes(8)


def joined(name: bytes, elements: int, distance: int) -> bytes:
    """Return the row of a tensor that is joined to the one so many rows later."""
    return row(name, elements, mode=0)[:-1] + bytes((8, distance))


def container(rows: bytes, count: int = 1, frames: bytes = b"") -> bytes:
    """Return a patch whose table declares `count` rows."""
    packed_table = compress(varint(count) + rows)
    return PREAMBLE.pack(b"GRP3", 0, len(packed_table), bytes(32), bytes(32)) + packed_table + frames
