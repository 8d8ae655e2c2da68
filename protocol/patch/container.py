"""The container of a patch: preamble, table, frames (docs/spec/patch.md, section 2). Reader and writer mirror each
other.

The whole table is checked before any frame is read: names are in strictly ascending order (so none occurs twice), sizes
are within protocol/limits.py, no frame has more bytes than its tensor could need, and the frames end where the patch
ends. Where the number of rows is not known before, a row is parsed from the table's bytes whenever it is needed,
because the row objects of a hostile table would take ten times its bytes.
"""

import math
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch

from protocol import limits
from protocol.compression import compress, decompress
from protocol.digest import dtypes, type_names
from protocol.errors import LimitError, MalformedError, PatchError
from protocol.patch.fields import Cursor, varint

PROFILES: Final = ("compact", "fast")
"""What an encoder aims at, small patches or short times; a decoder reads both alike. The preamble has the index."""

MAGIC: Final = b"GRP3"
PREAMBLE: Final = struct.Struct("<4sBxxxI32s32s")
CHECK_BYTES: Final = 8
FRAME_SLACK: Final = 64  # by how many bytes a frame may be larger than its tensors
MAX_JOINED_ELEMENTS: Final = 1 << 23
"""Elements of the small tensors that share a frame: copies of them, old and new, are in memory of each thread."""

_DTYPE_CODES: Final = tuple(sorted(type_names.values()))


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
    """The table's row of one tensor."""

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


class Table:
    """The rows of a table (compressed, hostile bytes), by ascending name: MalformedError, LimitError or PatchError if
    it is none, since every row is checked at once. They stay in memory if their number is that which the reader
    requires; else a row is parsed whenever it is accessed.
    """

    def __init__(self, packed: bytes | bytearray | memoryview, tensors: int | None) -> None:
        # Every row is parsed once here, so that no later access can fail.
        self._data = decompress(packed, limits.MAX_PATCH_HEADER_BYTES)
        self._offsets = array("I")
        self._parsed: list[tuple[TensorRow, int]] = []
        self.sizes = array("Q")
        """The size of each row's frame, in bytes."""
        cursor = self._cursor(0)
        count = cursor.varint(limits.MAX_TENSORS)
        if tensors is not None and count != tensors:
            raise PatchError(f"a patch of {count} tensors for weights of {tensors}")
        last_name, joined = None, dict[int, tuple[torch.dtype, int]]()  # by the place of the row that has the frame
        for place in range(count):
            self._offsets.append(cursor.offset)
            row, distance = _read_row(cursor)
            # Ascending names: a name cannot occur twice, and a patch has a single form.
            if last_name is not None and row.name <= last_name:
                raise MalformedError("a tensor twice, or names out of order", row.name)
            last_name = row.name
            self.sizes.append(row.size)
            if tensors is not None:
                self._parsed.append((row, distance))
            has_others = place in joined
            dtype, elements = joined.pop(place, (row.dtype, 0))
            # Tensors that share a frame are small, since a decoder has them in memory twice.
            if has_others and elements + row.elements > MAX_JOINED_ELEMENTS:
                raise LimitError(f"joined tensors of {elements + row.elements} elements", row.name)
            if has_others and row.mode in (Mode.UNCHANGED, Mode.JOINED):
                raise PatchError("tensors joined to one without a frame", row.name)
            if row.mode == Mode.JOINED:
                dtype, elements = joined.get(place + distance, (row.dtype, 0))
                joined[place + distance] = row.dtype, elements + row.elements
            elif row.mode != Mode.UNCHANGED:
                _check_frame(row, elements + row.elements)
            if dtype != row.dtype:
                raise PatchError("joined to a tensor of another dtype", row.name)
        if joined:
            raise PatchError("a tensor that is joined to none", "patch table")
        cursor.finish()

    def _cursor(self, offset: int) -> Cursor:
        return Cursor(self._data, "patch table", offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def _row(self, index: int) -> tuple[TensorRow, int]:
        return self._parsed[index] if self._parsed else _read_row(self._cursor(self._offsets[index]))

    def __getitem__(self, index: int) -> TensorRow:
        row, distance = self._row(index)
        return row._replace(host=self._row(index + distance)[0].name) if distance else row

    def __iter__(self) -> Iterator[TensorRow]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True, slots=True)
class Header:
    """The preamble and the table of a patch."""

    profile: str
    base: bytes  # digest of the weights that the patch applies to
    result: bytes  # digest of the weights that it gives
    rows: Table  # a row for every tensor of the weights, by ascending name
    frames_begin: int  # offset of the first frame, in bytes

    @property
    def patch_bytes(self) -> int:
        return self.frames_begin + sum(self.rows.sizes)

    @property
    def changed(self) -> int:
        """Number of changed elements of all tensors."""
        return sum(row.changed for row in self.rows)


def units_of(rows: Iterable[TensorRow]) -> dict[str, tuple[TensorRow, ...]]:
    """Return the rows of the tensors of each frame, by the name of the last one, to which the others are joined."""
    units = defaultdict[str, list[TensorRow]](list)
    for row in rows:
        units[row.host or row.name].append(row)
    return {name: tuple(unit) for name, unit in units.items()}


def unit_row(rows: Sequence[TensorRow]) -> TensorRow:
    """Return the row of a frame as that of one tensor, which has the elements of all, one after the other."""
    return rows[0] if len(rows) == 1 else rows[-1]._replace(shape=(sum(row.elements for row in rows),))


def _write_row(row: TensorRow, distance: int) -> bytes:
    name = row.name.encode()
    if len(name) > limits.MAX_NAME_BYTES or len(row.shape) > limits.MAX_RANK:
        raise LimitError("a name or a rank over its cap", row.name[:64])
    parts = [varint(len(name)), name, bytes((_DTYPE_CODES.index(type_names[row.dtype]), len(row.shape)))]
    parts += [varint(size) for size in row.shape]
    parts.append(bytes((row.mode,)))
    if row.mode == Mode.JOINED:
        parts.append(varint(distance))
    elif row.mode != Mode.UNCHANGED:
        parts += [varint(row.changed), varint(row.size), row.check]
    return b"".join(parts)


def _read_shape(cursor: Cursor, name: str) -> tuple[int, ...]:
    rank = cursor.byte()
    if rank > limits.MAX_RANK:
        raise LimitError(f"{rank} dimensions", name)
    shape = tuple(cursor.varint(limits.MAX_ELEMENTS) for _ in range(rank))
    if math.prod(shape) > limits.MAX_ELEMENTS:
        raise LimitError(f"{math.prod(shape)} elements", name)
    return shape


def _read_name(cursor: Cursor) -> str:
    length = cursor.varint(limits.MAX_NAME_BYTES)
    try:
        return cursor.take(length).decode()
    except UnicodeDecodeError as error:
        raise MalformedError("a name that is not UTF-8", "patch table") from error


def _read_row(cursor: Cursor) -> tuple[TensorRow, int]:
    """Read a row without its host, and how many rows later the host's row comes; 0 if the tensor is not joined."""
    name = _read_name(cursor)
    code = cursor.byte()
    if code >= len(_DTYPE_CODES):
        raise MalformedError(f"no dtype has the code {code}", name)
    dtype = dtypes[_DTYPE_CODES[code]]
    shape = _read_shape(cursor, name)
    code = cursor.byte()
    if code not in _modes:
        raise MalformedError(f"no mode has the code {code}", name)
    mode = _modes[code]
    if mode in (Mode.UNCHANGED, Mode.JOINED):
        distance = cursor.varint(limits.MAX_TENSORS) if mode == Mode.JOINED else 0
        if mode == Mode.JOINED and not distance:
            raise MalformedError("joined to itself", name)
        return TensorRow(name, dtype, shape, mode, 0, 0, b""), distance
    changes, size = cursor.varint(limits.MAX_ELEMENTS), cursor.varint(limits.MAX_PATCH_BYTES)
    return TensorRow(name, dtype, shape, mode, changes, size, cursor.take(CHECK_BYTES)), 0


def _check_frame(row: TensorRow, elements: int) -> None:
    if not 1 <= row.changed <= elements:
        raise PatchError(f"{row.changed} of {elements} elements changed", row.name)
    # A raw frame is as large as its tensors, so an encoder needs no more. A decoder may thus reserve `size` bytes.
    if row.size > elements * row.dtype.itemsize + FRAME_SLACK:
        raise PatchError(f"a frame of {row.size} bytes for {elements * row.dtype.itemsize} bytes of weights", row.name)


def write_container(
    profile: str, base: bytes, result: bytes, rows: Sequence[TensorRow], frames: Sequence[memoryview]
) -> bytes:
    """Build a patch from its rows and their frames, both by ascending name."""
    # The limits of a reader, so that nobody signs a patch that every follower refuses.
    places = {row.name: place for place, row in enumerate(rows)}
    table = varint(len(rows)) + b"".join(
        _write_row(row, places[row.host or row.name] - place) for place, row in enumerate(rows)
    )
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
    if magic != MAGIC or bytes(data[5:8]) != bytes(3):
        raise MalformedError("not a patch", "patch")
    if profile >= len(PROFILES):
        raise MalformedError(f"no profile has the code {profile}", "patch")
    if packed > limits.MAX_PATCH_HEADER_BYTES:
        raise LimitError(f"a table of {packed} bytes", "patch")
    return PREAMBLE.size + int(packed)


def read_header(data: bytes | bytearray | memoryview, tensors: int | None = None) -> Header:
    """Read preamble and table (hostile bytes); the frames need not be there yet. A table for another number of tensors
    than that of the weights is refused before its rows are read. MalformedError, LimitError: the bytes break
    docs/spec/patch.md. PatchError: the table contradicts itself.
    """
    end = header_bytes(data)
    _, profile, _, base, result = PREAMBLE.unpack_from(data)
    if len(data) < end:
        raise MalformedError(f"cut off at byte {len(data)}", "patch table")
    with memoryview(data) as whole, whole[PREAMBLE.size : end] as packed:
        table = Table(packed, tensors)
    return Header(PROFILES[profile], base, result, table, end)


def check_length(data: bytes | bytearray | memoryview, header: Header) -> None:
    """Check that the frames end where the patch ends: LimitError if it is too large, else MalformedError."""
    if header.patch_bytes > limits.MAX_PATCH_BYTES:
        raise LimitError(f"a patch of {header.patch_bytes} bytes", "patch")
    if len(data) != header.patch_bytes:
        raise MalformedError(f"{len(data)} bytes where the table says {header.patch_bytes}", "patch")


def split_frames(data: bytes | bytearray | memoryview, header: Header) -> Iterator[memoryview]:
    """Return an iterator over the frames, one for each row, after `check_length`."""
    # Before the first frame is read: so the table accounts for every byte of the patch.
    check_length(data, header)
    ends = accumulate(header.rows.sizes, initial=header.frames_begin)
    return (memoryview(data)[begin:end] for begin, end in pairwise(ends))


def split_parts(patch: bytes, part_bytes: int) -> tuple[bytes, ...]:
    """Split a patch of this program into parts that end where a frame ends; joined, they are the patch. A part has more
    than `part_bytes` only by its last frame, or where there would be more than MAX_PATCH_PARTS.
    """
    # Of parts that have at least this size, there are at most MAX_PATCH_PARTS.
    header = read_header(patch)
    part_bytes = max(part_bytes, -(-len(patch) // limits.MAX_PATCH_PARTS))
    parts, begin = [], 0
    for end in accumulate(header.rows.sizes, initial=header.frames_begin):
        if end - begin >= part_bytes:
            parts.append(patch[begin:end])
            begin = end
    return tuple([*parts, patch[begin:]] if begin < len(patch) else parts)
