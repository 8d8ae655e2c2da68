"""Patches whose tables and frames are written byte by byte, as a hostile encoder could."""

from collections.abc import Sequence

from protocol.compression import compress
from protocol.patch.container import PREAMBLE
from protocol.patch.fields import varint


def entry(changes: int = 1, size: int = 0) -> bytes:
    """Return what a table says of a frame."""
    return varint(changes) + varint(size) + bytes(8)


def container(codes: Sequence[int], entries: bytes = b"", frames: bytes = b"", count: int | None = None) -> bytes:
    """Return a patch whose table has a code for each tensor, and declares `count` of them."""
    table = varint(len(codes) if count is None else count) + b"".join(map(varint, codes)) + entries
    packed_table = compress(table)
    return PREAMBLE.pack(b"GRP4", 0, len(packed_table), bytes(32), bytes(32)) + packed_table + frames
