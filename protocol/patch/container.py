"""The container of a patch: preamble, table, frames (docs/spec/patch.md, section 2). Reader and writer mirror each
other.

The table has a code for each tensor of the weights, by ascending name, and what only the patch knows of each frame.
Names, dtypes and shapes are those of the base, to which its digest binds the patch. So the table is read in two steps:
`Table` checks the bytes, without any weights, and `Table.units` what they mean for the tensors of the base: no frame
has more bytes than its tensors could need, and all of it before any frame is read. A hostile table stays in arrays,
because objects for its rows would take ten times its bytes.
"""

import math
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol import limits
from protocol.compression import compress, decompress
from protocol.digest import Described
from protocol.errors import LimitError, MalformedError, PatchError
from protocol.patch.fields import Cursor, varint

PROFILES: Final = ("compact", "fast")
"""What an encoder aims at, small patches or short times; a decoder reads both alike. The preamble has the index."""

MAGIC: Final = b"GRP4"
PREAMBLE: Final = struct.Struct("<4sBxxxI32s32s")
CHECK_BYTES: Final = 8
FRAME_SLACK: Final = 64  # by how many bytes a frame may be larger than its tensors
MAX_JOINED_ELEMENTS: Final = 1 << 23
"""Elements of the small tensors that share a frame: copies of them, old and new, are in memory of each thread."""


class Mode(IntEnum):
    """The form of a tensor's frame."""

    UNCHANGED = 0
    SPARSE = 1
    STEPS = 2
    VALUE_PLANES = 3
    XOR_PLANES = 4
    RAW = 5
    SMALL_CHANGES = 6
    ROWS = 7
    JOINED = 8


_modes: Final = {mode.value: mode for mode in Mode}


class TensorRow(NamedTuple):
    """A tensor of the weights, and what the table says of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mode: Mode
    changed: int  # number of elements whose bits differ
    size: int  # bytes of the frame
    # the first 8 bytes of the BLAKE3 of the tensor's new bytes; empty if the tensor is unchanged or joined
    check: bytes
    host: str = ""  # name of the tensor whose frame has a joined tensor's changes, and counts them; else empty

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


Unit = tuple[TensorRow, ...]
"""The tensors of one frame, by ascending name: that of the last row. An unchanged tensor is alone, and has none."""


class Table:
    """A table (compressed, hostile bytes): MalformedError, LimitError or PatchError if it is none of any weights."""

    def __init__(self, packed: bytes | bytearray | memoryview) -> None:
        data = decompress(packed, limits.MAX_PATCH_HEADER_BYTES)
        cursor = Cursor(data, "patch table")
        count, most = cursor.varint(limits.MAX_TENSORS), Mode.JOINED + limits.MAX_TENSORS
        codes: NDArray[np.int64] = np.fromiter((cursor.varint(most) for _ in range(count)), np.int64, count)
        has_frame, joined = (codes > 0) & (codes < Mode.JOINED), codes >= Mode.JOINED
        places = np.flatnonzero(has_frame)
        self._codes, self._hosts = codes, np.arange(count)
        # A joined tensor's code says how many other frames begin before that of its host.
        self._frames: NDArray[np.int64] = np.cumsum(has_frame) - has_frame
        hosts = self._frames[joined] + codes[joined] - Mode.JOINED
        if hosts.size and hosts.max() >= places.size:
            raise PatchError("a tensor that is joined to none", "patch table")
        self._hosts[joined] = places[hosts]
        self.changed, self.sizes, self._checks = array("Q"), array("Q"), bytearray()
        """Of each frame, the number of changed elements, and of bytes; and the checks of all."""
        for _ in range(places.size):
            self.changed.append(cursor.varint(limits.MAX_ELEMENTS))
            self.sizes.append(cursor.varint(limits.MAX_PATCH_BYTES))
            self._checks += cursor.take(CHECK_BYTES)
        cursor.finish()

    def units(self, weights: Mapping[str, Described]) -> list[Unit]:
        """Return what the table says of the tensors of weights, in the order of its frames: PatchError or LimitError if
        it does not fit their number, dtypes and shapes.
        """
        if len(weights) != self._codes.size:
            raise PatchError(f"a patch of {self._codes.size} tensors for weights of {len(weights)}")
        names, rows = sorted(weights), list[TensorRow]()
        columns: Any = self._codes.tolist(), self._hosts.tolist(), self._frames.tolist()
        for place, (name, code, host, frame) in enumerate(zip(names, *columns, strict=True)):
            tensor, fields = weights[name], (0, 0, b"", "" if host == place else names[host])
            if 0 < code < Mode.JOINED:
                check = bytes(self._checks[frame * CHECK_BYTES : (frame + 1) * CHECK_BYTES])
                fields = self.changed[frame], self.sizes[frame], check, ""
            mode = _modes[min(code, Mode.JOINED)]
            rows.append(TensorRow(name, tensor.dtype, tuple(tensor.shape), mode, *fields))
        units = units_of(rows)
        for unit in units:
            _check_unit(unit)
        return units


@dataclass(frozen=True, slots=True)
class Header:
    """The preamble and the table of a patch."""

    profile: str
    base: bytes  # digest of the weights that the patch applies to
    result: bytes  # digest of the weights that it gives
    table: Table
    frames_begin: int  # offset of the first frame, in bytes

    @property
    def patch_bytes(self) -> int:
        return self.frames_begin + sum(self.table.sizes)

    @property
    def changed(self) -> int:
        """Number of changed elements of all tensors."""
        return sum(self.table.changed)


def units_of(rows: Iterable[TensorRow]) -> list[Unit]:
    """Return rows, which ascend by name, by the frames of their tensors, in the order of the frames."""
    units, joined = list[Unit](), defaultdict[str, list[TensorRow]](list)
    for row in rows:
        if row.host:
            joined[row.host].append(row)
        else:
            units.append((*joined.pop(row.name, ()), row))
    return units


def unit_row(rows: Sequence[TensorRow]) -> TensorRow:
    """Return the row of a frame as that of one tensor, which has the elements of all, one after the other."""
    return rows[0] if len(rows) == 1 else rows[-1]._replace(shape=(sum(row.elements for row in rows),))


def _check_unit(unit: Unit) -> None:
    elements, row = sum(row.elements for row in unit), unit[-1]
    # Tensors that share a frame are small, since a decoder has them in memory twice.
    if len(unit) > 1 and elements > MAX_JOINED_ELEMENTS:
        raise LimitError(f"joined tensors of {elements} elements", row.name)
    if len(unit) > 1 and len({row.dtype for row in unit}) > 1:
        raise PatchError("joined to a tensor of another dtype", row.name)
    if row.mode != Mode.UNCHANGED and not 1 <= row.changed <= elements:
        raise PatchError(f"{row.changed} of {elements} elements changed", row.name)
    # A raw frame is as large as its tensors, so an encoder needs no more. A decoder may thus reserve `size` bytes.
    if row.size > elements * row.dtype.itemsize + FRAME_SLACK:
        raise PatchError(f"a frame of {row.size} bytes for {elements * row.dtype.itemsize} bytes of weights", row.name)


def write_container(
    profile: str, base: bytes, result: bytes, rows: Sequence[TensorRow], frames: Sequence[memoryview]
) -> bytes:
    """Build a patch from its rows and their frames, both by ascending name."""
    own = [row for row in rows if row.mode not in (Mode.UNCHANGED, Mode.JOINED)]
    numbers, begun, codes = {row.name: number for number, row in enumerate(own)}, 0, [varint(len(rows))]
    for row in rows:
        codes.append(varint(row.mode if not row.host else Mode.JOINED + numbers[row.host] - begun))
        begun += row.name in numbers
    table = b"".join(codes + [varint(row.changed) + varint(row.size) + row.check for row in own])
    # The limits of a reader, so that nobody signs a patch that every follower refuses.
    if len(table) > limits.MAX_PATCH_HEADER_BYTES or len(rows) > limits.MAX_TENSORS:
        raise LimitError(f"a table of {len(table)} bytes and {len(rows)} tensors")
    packed = compress(table)
    preamble = PREAMBLE.pack(MAGIC, PROFILES.index(profile), len(packed), base, result)
    return b"".join((preamble, packed, *frames))


def header_bytes(data: bytes | bytearray | memoryview) -> int:
    """Return the bytes of preamble and table; MalformedError for no preamble, LimitError for too large a table."""
    if len(data) < PREAMBLE.size:
        raise MalformedError("shorter than a preamble", "patch")
    # The reserved bytes must be zeros, so that they can mean something in a later format.
    magic, profile, packed, _, _ = PREAMBLE.unpack_from(data)
    if magic != MAGIC and magic[:3] == MAGIC[:3]:
        raise MalformedError(f"of another version of the format, {magic!r}, where this program has {MAGIC!r}", "patch")
    if magic != MAGIC or bytes(data[5:8]) != bytes(3):
        raise MalformedError("not a patch", "patch")
    if profile >= len(PROFILES):
        raise MalformedError(f"no profile has the code {profile}", "patch")
    if packed > limits.MAX_PATCH_HEADER_BYTES:
        raise LimitError(f"a table of {packed} bytes", "patch")
    return PREAMBLE.size + int(packed)


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """Read preamble and table (hostile bytes); the frames need not be there yet. MalformedError, LimitError: the bytes
    break docs/spec/patch.md. PatchError: the table contradicts itself.
    """
    end = header_bytes(data)
    _, profile, _, base, result = PREAMBLE.unpack_from(data)
    if len(data) < end:
        raise MalformedError(f"cut off at byte {len(data)}", "patch table")
    with memoryview(data) as whole, whole[PREAMBLE.size : end] as packed:
        table = Table(packed)
    return Header(PROFILES[profile], base, result, table, end)


def check_length(data: bytes | bytearray | memoryview, header: Header) -> None:
    """Check that the frames end where the patch ends: LimitError if it is too large, else MalformedError."""
    if header.patch_bytes > limits.MAX_PATCH_BYTES:
        raise LimitError(f"a patch of {header.patch_bytes} bytes", "patch")
    if len(data) != header.patch_bytes:
        raise MalformedError(f"{len(data)} bytes where the table says {header.patch_bytes}", "patch")


def split_frames(
    data: bytes | bytearray | memoryview, header: Header, units: Iterable[Unit]
) -> Iterator[tuple[Unit, memoryview]]:
    """Yield each unit of the header's table with its frame, after `check_length`."""
    # Before the first frame is read: so the table accounts for every byte of the patch.
    check_length(data, header)
    end = header.frames_begin
    for unit in units:
        begin, end = end, end + unit[-1].size
        yield unit, memoryview(data)[begin:end]


def split_parts(patch: bytes, part_bytes: int) -> tuple[bytes, ...]:
    """Split a patch of this program into parts that end where a frame ends; joined, they are the patch. A part has more
    than `part_bytes` only by its last frame, or where there would be more than MAX_PATCH_PARTS.
    """
    # Of parts that have at least this size, there are at most MAX_PATCH_PARTS.
    header = read_header(patch)
    part_bytes = max(part_bytes, -(-len(patch) // limits.MAX_PATCH_PARTS))
    parts, begin = [], 0
    for end in accumulate(header.table.sizes, initial=header.frames_begin):
        if end - begin >= part_bytes:
            parts.append(patch[begin:end])
            begin = end
    return tuple([*parts, patch[begin:]] if begin < len(patch) else parts)
