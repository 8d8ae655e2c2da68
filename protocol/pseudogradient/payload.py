"""The payload of a contribution: a head and a frame for each part (docs/spec/pseudogradient.md, section 1).

The receiver knows the weights that the contribution starts from, so the payload names no tensors. The head is checked
before any frame is read, and each length before the bytes that it bounds are copied.

A payload has one file or several: the first begins with the head, which names the others by their SHA-256.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from protocol import limits
from protocol.errors import ContributionError, LimitError, MalformedError
from protocol.patch.fields import Cursor, varint
from protocol.pseudogradient.parts import Part

MAGIC: Final = b"GRG3"
_FIXED: Final = struct.Struct("<4sBBHI32s32sQdI")
_WHERE: Final = "contribution"

MAX_FRACTION: Final = 8
MAX_CHOSEN: Final = 1024
FRAME_SLACK: Final = 1024
"""Bytes that a frame may have, for each tensor and each chunk of 2^21 elements, beside 33 bits for each element."""


def largest_frame(part: Part) -> int:
    """Return the most bytes that the frame of a part may have."""
    return 33 * part.elements // 8 + FRAME_SLACK * (len(part.names) + (part.elements >> 21) + 1)


def largest_head(parts: Sequence[Part]) -> int:
    """Return the most bytes that a head may have: for each part two varints, and the digest of a file."""
    return _FIXED.size + (2 * 10 + 32) * len(parts)


def largest_first_file(parts: Sequence[Part]) -> int:
    """Return the most bytes that a payload's first file may have."""
    frames = [largest_frame(part) for part in parts]
    return largest_head(parts) + min(sum(frames), max(limits.MAX_PAYLOAD_FILE_BYTES, *frames, 0))


class File(Protocol):
    """The bytes of a file of a payload, which need not be in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


Payload = Sequence[File]
"""The files of a payload, in order."""


class Kind(IntEnum):
    """How values are coded."""

    DENSE = 0
    EXACT = 1
    GRID = 2
    CHUNKED = 3


@dataclass(frozen=True, slots=True)
class Coding:
    """The coding of a payload; MalformedError if a field is out of range."""

    kind: Kind
    # for GRID, log2 of the grid steps in a BF16 unit in the last place, from 0 to MAX_FRACTION; else 0
    fraction: int = 0
    chosen: int = 0  # for CHUNKED, the entries of a whole chunk of 4096 elements, from 1 to MAX_CHOSEN; else 0

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= (MAX_FRACTION if self.kind == Kind.GRID else 0):
            raise MalformedError(f"a fraction of {self.fraction}", _WHERE)
        least, most = (1, MAX_CHOSEN) if self.kind == Kind.CHUNKED else (0, 0)
        if not least <= self.chosen <= most:
            raise MalformedError(f"{self.chosen} entries of a chunk", _WHERE)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a payload."""

    coding: Coding  # of all frames
    base: bytes  # digest of the FP32 weights that the contribution starts from: 32 bytes
    sender: bytes  # 32 bytes that name the site and the round (`round_checks.sender_digest`)
    squared_norm: float  # sum of the squares of all values (see `arithmetic.SquaredNorm`)
    entries: tuple[int, ...]  # number of entries of each part
    sizes: tuple[int, ...]  # bytes of each part's frame
    file_bytes: int  # most bytes of the frames in a file, unless it has a single one
    digests: tuple[bytes, ...]  # SHA-256 of each file but the first

    @property
    def frames(self) -> tuple[tuple[int, int, int], ...]:
        """Of each frame the number of its file, its first byte there, and the one behind its last."""
        frames, begin, last = [], len(write_head(self)), 0
        for number, size in zip(file_numbers(self.sizes, self.file_bytes), self.sizes, strict=True):
            # The head stands in front of the first file's frames alone.
            begin = begin if number == last else 0
            frames.append((number, begin, begin + size))
            begin, last = begin + size, number
        return tuple(frames)

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of each file."""
        ends = {0: len(write_head(self))} | {number: end for number, _, end in self.frames}
        return tuple(ends.values())


def file_numbers(sizes: Sequence[int], file_bytes: int) -> list[int]:
    """Return the number of the file that has each frame, in order, by the bytes of the frames. A file ends before the
    frame that would bring its frames above `file_bytes`, so that a larger frame has a file of its own.
    """
    numbers, number, used = [], 0, 0
    for size in sizes:
        if used and used + size > file_bytes:
            number, used = number + 1, 0
        used += size
        numbers.append(number)
    return numbers


def write_head(head: Head) -> bytes:
    """Serialize a head."""
    coding, total = head.coding, sum(head.entries)
    form = (MAGIC, coding.kind, coding.fraction, coding.chosen)
    fixed = _FIXED.pack(*form, len(head.sizes), head.base, head.sender, total, head.squared_norm, head.file_bytes)
    rows = (varint(entries) + varint(size) for entries, size in zip(head.entries, head.sizes, strict=True))
    return fixed + b"".join((*rows, *head.digests))


def _read_fixed(cursor: Cursor, parts: int) -> tuple[Coding, bytes, bytes, int, float, int]:
    # What the head says of the values is checked as far as it goes alone; the rest, when they are decoded.
    magic, kind, fraction, chosen, count, *rest = _FIXED.unpack(cursor.take(_FIXED.size))
    base, sender, total, squared_norm, file_bytes = rest
    if magic != MAGIC:
        raise MalformedError("not a contribution", _WHERE)
    if kind not in Kind.__members__.values():
        raise MalformedError(f"no kind of coding has the code {kind}", _WHERE)
    if count != parts:
        raise ContributionError(f"{count} parts for weights of {parts}", _WHERE)
    # A negative zero would be a second form of the same norm.
    if not (math.isfinite(squared_norm) and squared_norm >= 0) or math.copysign(1.0, squared_norm) < 0:
        raise MalformedError("a norm that is no finite number from 0 on", _WHERE)
    if not limits.MIN_PAYLOAD_FILE_BYTES <= file_bytes <= limits.MAX_PAYLOAD_FILE_BYTES:
        raise LimitError(f"files of {file_bytes} bytes", _WHERE)
    return Coding(Kind(kind), fraction, chosen), base, sender, total, squared_norm, file_bytes


def read_head(first: File, parts: Sequence[Part], *, max_norm: float = math.inf) -> Head:
    """Read the head of a payload's first file, hostile bytes that need not contain the frames yet. A ProtocolError says
    that they break docs/spec/pseudogradient.md, exceed a limit, contradict themselves, do not fit the weights with
    these parts, or that the L2 norm of the values is above `max_norm`.
    """
    cursor = Cursor(first[: largest_head(parts)], _WHERE)
    coding, base, sender, total, squared_norm, file_bytes = _read_fixed(cursor, len(parts))
    if math.sqrt(squared_norm) > max_norm:
        raise LimitError(
            f"values of a norm of {math.sqrt(squared_norm):g} where at most {max_norm:g} is allowed", _WHERE
        )
    # Each part's numbers are bounded by the part that the receiver has, so no sum can be large.
    entries, sizes = [], []
    for part in parts:
        entries.append(cursor.varint(part.elements))
        sizes.append(cursor.varint(largest_frame(part)))
        # A dense part has no choice: every entry, in 4 bytes.
        if coding.kind == Kind.DENSE and (entries[-1], sizes[-1]) != (part.elements, 4 * part.elements):
            raise ContributionError("a dense part that is not whole", part.names[0])
    if sum(entries) != total:
        raise ContributionError(f"{sum(entries)} entries in the parts where the head says {total}", _WHERE)
    if sum(sizes) > limits.MAX_CONTRIBUTION_BYTES:
        raise LimitError(f"frames of {sum(sizes)} bytes", _WHERE)
    # How many files there are follows from the frames, so that a head names neither too few nor too many.
    files = file_numbers(sizes, file_bytes)[-1] if sizes else 0
    digests = tuple(cursor.take(32) for _ in range(files))
    return Head(coding, base, sender, squared_norm, tuple(entries), tuple(sizes), file_bytes, digests)
