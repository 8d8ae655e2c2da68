"""Sparse frames: a model, a directory of chunks, the chunks (docs/spec/patch.md, section 3).

A chunk is up to 2^21 elements that never span a boundary between rows that two shards may hold, and is coded by itself:
a section of the entropy coder's words and one of plain bits.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PatchError
from protocol.kernels.simd import LANES, MAX_CLASSES
from protocol.patch.bounded_buffer import BoundedBuffer, OutOfRoomError
from protocol.patch.container import Cursor, varint
from protocol.patch.context_model import Model, Statistics, choose_classes, form_of, read_model, write_model
from protocol.patch.entropy_decoding import NEVER, PAST_THE_END, decoders_for, reasons
from protocol.patch.entropy_encoding import GROUPS, OUT_OF_ROOM, coders_for
from protocol.patch.rans import STEP_SYMBOLS
from protocol.patch.values import Bits, Layout

CHUNK_ELEMENTS: Final = 1 << 21
PIECE_ELEMENTS: Final = 1 << 17
"""Elements of a chunk that are decoded at a time, so that what comes next finds them in the cache."""

MAX_MODEL_BYTES: Final = 2 + GROUPS * (3 + STEP_SYMBOLS)
MAX_DIRECTORY_BYTES: Final = 4 * (GROUPS + 2)  # of one chunk

HELD_SHARE: Final = 1 / 16
MIN_HELD: Final = 1 << 16
"""Changes that are kept while a model is made for them: so many for each element, but at least so many, of 8 bytes
each.
"""

HOPELESS: Final = 1.25
"""An encoder gives up when its first chunks promise so many times the bytes that there may be."""

MAX_SHARDS: Final = 8
MIN_SHARD_ELEMENTS: Final = 1 << 19


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


class Scratch:
    """Scratch memory of one worker, kept from tensor to tensor; only what changes need of it is ever touched.

    Attributes:
        unsorted, words, raw: changes as they are found, and the sections that they become, of one chunk, one after the
            other in the same memory.
    """

    def __init__(self) -> None:
        self._changes = np.empty(0, np.uint64)
        self.unsorted = np.empty(CHUNK_ELEMENTS + 1, np.uint64)
        self.words = self.unsorted.view(np.uint16)[: 2 * CHUNK_ELEMENTS]
        self.raw = self.unsorted.view(np.uint32)
        self.classes = np.empty(LANES, np.uint8)

    def changes(self, size: int) -> NDArray[np.uint64]:
        """Room for as many changes; what was there is lost."""
        if size > self._changes.size:
            self._changes = np.empty(size, np.uint64)
        return self._changes


def _padded(bits: Bits) -> Bits:
    """The elements behind the last whole 64, and zeros."""
    padded: Bits = np.zeros(LANES, bits.dtype)
    padded[: bits.size % LANES] = bits[bits.size // LANES * LANES :]
    return padded


@dataclass(frozen=True, slots=True)
class _Found:
    """The changes of one chunk, by group, and how many each group has: int64[GROUPS]."""

    changes: NDArray[np.uint64]
    counts: NDArray[np.int64]


class _Encoder:
    """Finds and codes the changes of one tensor."""

    def __init__(self, layout: Layout, first: int, classes: int, workspace: Scratch) -> None:
        self._layout, self._first, self._classes = layout, first, classes
        self._kernels = coders_for(layout.bits // 8)
        self._space = workspace
        self._form, self._order = form_of(layout, first, classes), layout.order
        self._statistics = Statistics()

    def find(self, old: Bits, new: Bits, into: NDArray[np.uint64], *, learn: bool) -> _Found:
        """The changes of a chunk, in the front of `into`; adds them to the statistics where these are to learn from
        them.
        """
        whole = old.size // LANES * LANES
        parts = [(old[:whole], new[:whole])]
        if whole < old.size:
            parts.append((_padded(old), _padded(new)))
        return (self._find if self._classes else self._find_listed)(parts, into, learn)

    def _find(self, parts: list[tuple[Bits, Bits]], into: NDArray[np.uint64], learn: bool) -> _Found:
        counts, left, listed = np.zeros(GROUPS, np.int64), np.zeros(MAX_CLASSES, np.int64), np.zeros(1, np.int64)
        state = self._form, self._order, self._space.classes, left, listed, self._space.unsorted, counts
        count = 0
        for old, new in parts:
            count = self._kernels.scan(old, new, *state)
        self._kernels.sort(self._space.unsorted, count, np.cumsum(counts) - counts, into)
        if learn:
            self._kernels.tally(into, count, self._statistics.elements, self._statistics.steps)
            self._statistics.elements[0] -= listed[0]
            self._statistics.elements[1:] -= left
        return _Found(into[:count], counts)

    def _find_listed(self, parts: list[tuple[Bits, Bits]], into: NDArray[np.uint64], learn: bool) -> _Found:
        counts, listed, count = np.zeros(GROUPS, np.int64), np.zeros(1, np.int64), 0
        symbols = self._statistics.steps[0] if learn else np.zeros(STEP_SYMBOLS, np.int64)
        for old, new in parts:
            count = self._kernels.scan_listed(old, new, self._order, listed, into, count, symbols)
        counts[0] = count
        if learn:
            self._statistics.elements[0] += sum(old.size for old, _ in parts)
        return _Found(into[:count], counts)

    def model(self) -> Model:
        """The model that fits what was learnt."""
        return self._statistics.model(self._layout, self._first, self._classes)

    def code(self, found: _Found, model: Model, tables: tuple[NDArray[np.uint64], ...], into: BoundedBuffer) -> bytes:
        """Append a chunk's data; returns its directory entry.

        Raises:
            OutOfRoomError: there is no room for it.
        """
        changes, counts = found.changes, found.counts
        head = b"".join(map(varint, counts[: len(model.groups)].tolist()))
        if not changes.size:
            return head
        out, raw = self._space.words, self._space.raw  # the same memory
        gaps, steps = tables
        begin = self._kernels.put_changes(
            changes, counts, model.buckets, model.known, gaps.ravel(), steps.ravel(), gaps.shape[1], steps.shape[1], out
        )
        if begin == OUT_OF_ROOM:
            raise OutOfRoomError
        words = out[begin:].astype("<u2", copy=False)
        into.put(words.data.cast("B"))
        bits = self._kernels.put_raw(changes, counts, model.buckets, model.known, raw)
        nbytes = (bits + 7) // 8
        into.put(raw[: bits // 32 + 1].astype("<u4", copy=False).data.cast("B")[:nbytes])
        return head + varint(words.size) + varint(nbytes)


def encode_sparse(
    old: Bits, new: Bits, shape: Sequence[int], layout: Layout, workspace: Scratch, below: int, *, classed: bool
) -> tuple[int, memoryview]:
    """A sparse frame: how many elements it changes, and its bytes.

    The model is made for the first chunks, as many as have HELD_SHARE of the elements in changes: for most tensors, all
    of them.

    Args:
        classed: with classes, which only floats have.

    Raises:
        OutOfRoomError: it would take `below` bytes or more: the tensor is better sent in another way.
    """
    encoder = _Encoder(layout, *(choose_classes(old, new, layout) if classed else (0, 0)), workspace)
    ranges = list(chunks_of(shape))
    held: list[_Found] = []
    used, enough = 0, min(old.size, max(MIN_HELD, int(HELD_SHARE * old.size)))
    room = workspace.changes(enough + min(old.size, CHUNK_ELEMENTS))
    for begin, end in ranges:
        held.append(encoder.find(old[begin:end], new[begin:end], room[used:], learn=True))
        used += held[-1].changes.size
        if used >= enough:
            break
    model = encoder.model()
    tables = model.encoder_tables()
    most = MAX_MODEL_BYTES + MAX_DIRECTORY_BYTES * len(ranges)
    directory, changed, sections = bytearray(write_model(model)), 0, BoundedBuffer(most + below)
    sections.used = most
    for number, (begin, end) in enumerate(ranges):
        found = held[number] if number < len(held) else encoder.find(old[begin:end], new[begin:end], room, learn=False)
        directory += encoder.code(found, model, tables, sections)
        changed += found.changes.size
        if number + 1 == len(held) and (sections.used - most) * old.size > HOPELESS * below * end:
            raise OutOfRoomError
    frame = sections.frame(directory, most)
    if len(frame) >= below:
        raise OutOfRoomError
    return changed, frame


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a frame.

    Attributes:
        begin, end: its elements.
        counts: how many listed changes it has, and how many of each class.
        words, raw: 16-bit words and bytes of its sections.
        offset: where these begin in the frame.
    """

    begin: int
    end: int
    counts: tuple[int, ...]
    words: int
    raw: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the sections."""
        return 2 * self.words + self.raw


def _read_chunk(cursor: Cursor, begin: int, end: int, model: Model, offset: int) -> Chunk:
    counts = tuple(cursor.varint(end - begin) for _ in model.groups)
    if sum(counts) > end - begin:
        raise PatchError(f"{sum(counts)} changes in elements {begin} to {end}")
    if not any(counts):
        return Chunk(begin, end, counts, 0, 0, offset)
    longest = (end - begin) * model.layout.bits // 8 + 512
    return Chunk(begin, end, counts, cursor.varint(longest), cursor.varint(longest), offset)


def read_directory(frame: memoryview, shape: Sequence[int], changed: int, layout: Layout) -> tuple[Model, list[Chunk]]:
    """The model and the chunks of a sparse frame.

    Raises:
        MalformedError, LimitError: not the form that docs/spec/patch.md gives.
        PatchError: counts or lengths that do not add up.
    """
    cursor = Cursor(frame, "sparse frame")
    model = read_model(cursor, layout)
    chunks: list[Chunk] = []
    offset = 0
    for begin, end in chunks_of(shape):
        chunks.append(_read_chunk(cursor, begin, end, model, offset))
        offset += chunks[-1].nbytes
    counted = sum(sum(chunk.counts) for chunk in chunks)
    if counted != changed:
        raise PatchError(f"{counted} changes in the chunks where the table says {changed}")
    if cursor.offset + offset != len(frame):
        raise PatchError(f"sections of {offset} bytes in a frame of {len(frame)}")
    return model, [replace(chunk, offset=cursor.offset + chunk.offset) for chunk in chunks]


class Decoder:
    """Makes the changes of the chunks of one frame."""

    def __init__(self, frame: memoryview, model: Model, *, back: bool = False) -> None:
        self._frame, self._model, self._back = frame, model, np.uint64(0xFFFFFFFFFFFFFFFF if back else 0)
        self._kernels = decoders_for(model.layout.bits // 8)
        self._tables = model.decoder_tables()
        self._order = model.layout.order
        self._classes = np.empty(LANES, np.uint8)
        self._scratch: Bits = np.empty(PIECE_ELEMENTS, f"u{model.layout.bits // 8}")

    def _changes(self, chunk: Chunk) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The chunk's changes, by group, and where each group begins."""
        model = self._model
        counts = np.zeros(GROUPS, np.int64)
        counts[: len(chunk.counts)] = chunk.counts
        words, raw = np.zeros(chunk.words + 8, np.uint16), np.zeros(chunk.raw // 4 + 5, "<u4")
        words[: chunk.words] = np.frombuffer(self._frame, "<u2", chunk.words, chunk.offset)
        raw.view(np.uint8)[: chunk.raw] = np.frombuffer(
            self._frame, np.uint8, chunk.raw, chunk.offset + 2 * chunk.words
        )
        changes = np.empty(int(counts.sum()) + GROUPS, np.uint64)
        raw = raw.astype(np.uint32, copy=False)
        tables = (model.buckets, model.known, *self._tables)
        if changes.size > GROUPS:
            elements = chunk.end - chunk.begin
            status = self._kernels.get_changes(elements, counts, words, raw, 8 * chunk.raw, *tables, changes)
            _check(status, chunk)
        else:
            changes[:] = NEVER << 33
        return changes, np.cumsum(counts + 1) - counts - 1

    def pieces(self, chunk: Chunk, old: Bits, new: Bits | None) -> Iterator[tuple[int, Bits]]:
        """The chunk's new elements, or the older ones when `back`, piece by piece.

        Args:
            old: the chunk's elements.
            new: where they go, which may be where they are; without it, each piece is good only until the next is asked
                for.

        Yields:
            Where in the chunk a piece begins, and its elements.

        Raises:
            PatchError: sections that do not fit the elements.
        """
        changes, cursor = self._changes(chunk)
        ends = cursor + np.array([*chunk.counts, *[0] * (GROUPS - len(chunk.counts))])
        first = (changes[cursor] >> np.uint64(33)).astype(np.int64)
        listed, left = first[:1].copy(), first[1:].copy()
        state = (self._order, self._back, changes, cursor)
        for begin in range(0, old.size, PIECE_ELEMENTS):
            source = old[begin : begin + PIECE_ELEMENTS]
            target = self._scratch[: source.size] if new is None else new[begin : begin + PIECE_ELEMENTS]
            if self._model.classes:
                self._place(source, target, (*state, self._classes, left, listed), chunk)
            else:
                _check(self._kernels.place_listed(source, target, *state, listed), chunk)
            yield begin, target
        if (cursor != ends).any():
            raise PatchError(f"{reasons[PAST_THE_END]}, in elements {chunk.begin} to {chunk.end}")

    def _place(self, old: Bits, new: Bits, state: tuple[Any, ...], chunk: Chunk) -> None:
        whole = new.size // LANES * LANES
        form, (order, *rest) = self._model.form, state
        _check(self._kernels.place(old[:whole], new[:whole], form, order, *rest), chunk)
        if whole < new.size:
            tail = _padded(old)
            _check(self._kernels.place(tail, tail, form, order, *rest), chunk)
            if tail[new.size - whole :].any():
                raise PatchError(f"{reasons[PAST_THE_END]}, in elements {chunk.begin} to {chunk.end}")
            new[whole:] = tail[: new.size - whole]


def _check(status: int, chunk: Chunk) -> None:
    if status:
        raise PatchError(f"{reasons[status]}, in elements {chunk.begin} to {chunk.end}")


def warm_up() -> None:
    """Compile the kernels for BF16, or load them: seconds the first time on a machine, a moment after that."""
    coders_for(2)
    decoders_for(2)
