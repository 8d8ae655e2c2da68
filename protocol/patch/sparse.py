"""Sparse frames: a model, a directory of chunks, the chunks (docs/spec/patch.md, section 3).

A chunk is up to 2^20 elements that never span a boundary between rows that two shards may hold, and is coded by itself. It
has a listed and a classed part, each of three sections: waits, steps, raw bits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import PatchError
from protocol.patch.container import Cursor, varint
from protocol.patch.decoding import decoders_for, reasons
from protocol.patch.encoding import OUT_OF_ROOM, Coders, coders_for
from protocol.patch.model import MAX_CLASSES, MAX_PRIORS, Model, plain, read_model, write_model
from protocol.patch.rangecoder import logarithm_table, rate_table, survival_table
from protocol.patch.room import OutOfRoomError, Room
from protocol.patch.values import Bits, Layout, layout_of

CHUNK_ELEMENTS: Final = 1 << 20
MAX_SHARDS: Final = 8
MIN_SHARD_ELEMENTS: Final = 1 << 19

MAX_MODEL_BYTES: Final = 2 + MAX_CLASSES * (3 + MAX_PRIORS)
MAX_DIRECTORY_BYTES: Final = 2 * 4 * 5  # of one chunk: two parts of four varints

_survival: Final = survival_table()
_rates: Final = rate_table()
_logarithms: Final = logarithm_table()


def shards_of(shape: Sequence[int]) -> int:
    """How many equal ranges of rows can be decoded apart from each other."""
    elements, rows = math.prod(shape), shape[0] if shape else 1
    shards = MAX_SHARDS
    while shards > 1 and (rows % shards or elements < shards * MIN_SHARD_ELEMENTS):
        shards //= 2
    return shards


def chunks_of(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The chunks of a tensor: (first element, behind last)."""
    elements = math.prod(shape)
    shard = elements // shards_of(shape)
    for begin in range(0, elements, max(1, shard)):
        for start in range(begin, begin + shard, CHUNK_ELEMENTS):
            yield start, min(start + CHUNK_ELEMENTS, begin + shard)


@dataclass(frozen=True, slots=True)
class Part:
    """The changes of one kind in one chunk: how many, and where their sections lie in the frame's data."""

    count: int
    waits: int
    steps: int
    raw: int

    @property
    def nbytes(self) -> int:
        """Bytes of the three sections."""
        return 2 * self.waits + 2 * self.steps + self.raw


@dataclass(frozen=True, slots=True)
class Sections:
    """The changes of one kind in one chunk."""

    count: int
    waits: NDArray[np.uint16]
    steps: NDArray[np.uint16]
    raw: NDArray[np.uint8]

    def directory(self) -> bytes:
        """The count and, unless it is 0, the sections' lengths."""
        if self.count == 0:
            return varint(0)
        return b"".join(varint(n) for n in (self.count, self.waits.size, self.steps.size, self.raw.size))

    def data(self) -> bytes:
        """The sections' bytes."""
        return self.waits.astype("<u2").tobytes() + self.steps.astype("<u2").tobytes() + self.raw.tobytes()


_nothing: Final = Sections(0, np.empty(0, np.uint16), np.empty(0, np.uint16), np.empty(0, np.uint8))


def _words(bits: Bits) -> NDArray[np.uint64]:
    """The elements' memory as 64-bit words, without a last incomplete one; a copy where it is not aligned."""
    whole = bits.size * bits.itemsize // 8 * 8 // bits.itemsize
    return np.require(bits[:whole].view(np.uint64), requirements="A")


class Workspace:
    """Scratch memory of one worker: 13 to 21 MiB, whatever the tensors' sizes."""

    def __init__(self) -> None:
        self.at = np.empty(CHUNK_ELEMENTS, np.uint32)
        self.waits = np.empty(CHUNK_ELEMENTS // 2 + 128, np.uint16)
        self._changes: dict[np.dtype[Any], tuple[Bits, Bits]] = {}

    def changes(self, dtype: np.dtype[Any]) -> tuple[Bits, Bits]:
        """Room for the listed and the classed changes of a chunk: twice [2, CHUNK_ELEMENTS]."""
        if dtype not in self._changes:
            room = np.empty((2, 2, CHUNK_ELEMENTS), dtype)
            self._changes = {dtype: (room[0], room[1])}
        return self._changes[dtype]


class _Encoder:
    """Codes the chunks of one tensor."""

    def __init__(self, model: Model, itemsize: int, workspace: Workspace) -> None:
        self._model = model
        self._kernels: Coders = coders_for(itemsize, model.layout.group_shift)
        self._space = workspace
        self._plain = plain(model.layout)
        self._order = model.layout.order

    def _steps(self, changes: Bits, count: int, model: Model) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        out = np.empty(3 * count + 128, np.uint16)
        raw = np.zeros(count * changes.itemsize + 64, np.uint8)
        words, bits = self._kernels.put_steps(
            changes,
            count,
            model.layout.group_shift,
            model.classes,
            self._order,
            _rates,
            *model.adaptive_bits(),
            out,
            raw,
        )
        if words == OUT_OF_ROOM:
            raise OutOfRoomError
        return out[:words].copy(), raw[: (bits + 7) // 8].copy()

    def _listed(self, changes: Bits, count: int) -> Sections:
        if count == 0:
            return _nothing
        out = np.empty(3 * count + 128, np.uint16)
        words = self._kernels.put_waits(self._space.at, count, self._model.listed_weight, _survival, out)
        if words == OUT_OF_ROOM:
            raise OutOfRoomError
        return Sections(count, out[:words].copy(), *self._steps(changes, count, self._plain))

    def chunk(self, old: Bits, new: Bits) -> tuple[Sections, Sections]:
        """The listed and the classed part of one chunk."""
        model, at = self._model, self._space.at
        words = (old, new, _words(old), _words(new))
        in_list, in_class = self._space.changes(old.dtype)
        if not model.firsts:
            return self._listed(in_list, self._kernels.find(*words, at, in_list)), _nothing
        out = self._space.waits[: old.size // 2 + 128]
        listed, classed, length = self._kernels.scan(
            *words, model.classes, model.weights, _survival, out, at, in_list, in_class
        )
        if length == OUT_OF_ROOM:
            raise OutOfRoomError
        if classed == 0:
            return self._listed(in_list, listed), _nothing
        steps = self._steps(in_class, classed, model)
        return self._listed(in_list, listed), Sections(classed, out[:length].copy(), *steps)


def encode_sparse(
    old: Bits, new: Bits, shape: Sequence[int], model: Model, workspace: Workspace, below: int
) -> tuple[int, memoryview]:
    """A sparse frame: how many elements it changes, and its bytes.

    Raises:
        OutOfRoomError: it would take `below` bytes or more: the tensor is better sent in another way.
    """
    encoder = _Encoder(model, old.itemsize, workspace)
    chunks = list(chunks_of(shape))
    most = MAX_MODEL_BYTES + MAX_DIRECTORY_BYTES * len(chunks)
    directory, changed, room = bytearray(write_model(model)), 0, Room(most + below)
    room.used = most
    for begin, end in chunks:
        for part in encoder.chunk(old[begin:end], new[begin:end]):
            directory += part.directory()
            room.put(part.data())
            changed += part.count
    frame = room.frame(directory, most)
    if len(frame) >= below:
        raise OutOfRoomError
    return changed, frame


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a frame: its elements, its parts and where their data begin."""

    begin: int
    end: int
    listed: Part
    classed: Part
    offset: int


def _read_part(cursor: Cursor, elements: int, itemsize: int) -> Part:
    count = cursor.varint(elements)
    if count == 0:
        return Part(0, 0, 0, 0)
    longest = elements * itemsize + 128
    return Part(count, cursor.varint(longest), cursor.varint(longest), cursor.varint(longest))


def read_directory(frame: memoryview, shape: Sequence[int], changed: int, layout: Layout) -> tuple[Model, list[Chunk]]:
    """The model and the chunks of a sparse frame.

    Raises:
        MalformedError, LimitError: not the form that docs/spec/patch.md gives.
        PatchError: counts or lengths that do not add up.
    """
    cursor = Cursor(frame, "sparse frame")
    model = read_model(cursor, layout)
    parts = []
    for begin, end in chunks_of(shape):
        listed = _read_part(cursor, end - begin, layout.bits // 8)
        classed = _read_part(cursor, end - begin if model.firsts else 0, layout.bits // 8)
        parts.append((begin, end, listed, classed))
    counted = sum(listed.count + classed.count for _, _, listed, classed in parts)
    if counted != changed:
        raise PatchError(f"{counted} changes in the chunks where the table says {changed}")
    offset, chunks = cursor.offset, []
    for begin, end, listed, classed in parts:
        chunks.append(Chunk(begin, end, listed, classed, offset))
        offset += listed.nbytes + classed.nbytes
    if offset != len(frame):
        raise PatchError(f"sections of {offset} bytes in a frame of {len(frame)}")
    return model, chunks


def _sections(frame: memoryview, offset: int, part: Part) -> Sections:
    waits, steps = offset + 2 * part.waits, offset + 2 * part.waits + 2 * part.steps
    return Sections(
        part.count,
        np.frombuffer(bytes(frame[offset:waits]), "<u2").astype(np.uint16),
        np.frombuffer(bytes(frame[waits:steps]), "<u2").astype(np.uint16),
        np.frombuffer(bytes(frame[steps : steps + part.raw]), np.uint8).copy(),
    )


def decode_chunk(frame: memoryview, chunk: Chunk, model: Model, old: Bits, new: Bits, *, back: bool = False) -> None:
    """Write the changes of one chunk into `new`, which holds the chunk's elements already.

    Args:
        old: the chunk's previous elements; when `back`, `new` itself: the steps are then taken back, which leaves the previous
            elements (the listed ones first, so that every class is what it was when the waits of the others were counted).

    Raises:
        PatchError: sections that do not fit the elements.
    """
    compiled = decoders_for(old.itemsize, model.layout.group_shift)
    layout, order = model.layout, model.layout.order
    listed = np.empty(chunk.listed.count + 1, np.uint32)
    listed[0] = old.size
    if chunk.listed.count:
        part = _sections(frame, chunk.offset, chunk.listed)
        state = (_rates, *plain(layout).adaptive_bits(), part.steps, part.raw)
        status = compiled.get_listed(
            old,
            new,
            part.count,
            int(back),
            order,
            listed,
            model.listed_weight,
            _survival,
            _logarithms,
            part.waits,
            *state,
        )
        _check(status, chunk)
    if chunk.classed.count:
        part = _sections(frame, chunk.offset + chunk.listed.nbytes, chunk.classed)
        state = (_rates, *model.adaptive_bits(), part.steps, part.raw)
        status = compiled.get_classed(
            old, new, part.count, int(back), order, listed, model.classes, model.weights, _survival,
            _logarithms, part.waits, *state
        )  # fmt: skip
        _check(status, chunk)


def _check(status: int, chunk: Chunk) -> None:
    if status:
        raise PatchError(f"{reasons[status]}, in elements {chunk.begin} to {chunk.end}")


def warm_up() -> None:
    """Compile the kernels for BF16, or load them: seconds the first time on a machine, a moment after that."""
    shift = layout_of(torch.bfloat16).group_shift
    coders_for(2, shift)
    decoders_for(2, shift)
