"""Sparse frames: a model, a directory of chunks, the chunks (docs/spec/patch.md, section 3).

A chunk has up to 2^21 elements. It is coded independently, as a section of the entropy coder's words and a section of
raw bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PatchError
from protocol.kernels.simd import MAX_CLASSES, VECTOR_SIZE
from protocol.patch.context_model import Model, Statistics, classes_of, form_of, read_model, sample_changes, write_model
from protocol.patch.dense_coding import BLOCK
from protocol.patch.entropy_decoding import NEVER, PAST_THE_END, apply_all, apply_changes, get_changes, reasons
from protocol.patch.entropy_encoding import BUFFER_FULL, GROUPS, put_changes, put_raw, scan, scan_all, sort, tally
from protocol.patch.fields import BoundedBuffer, BufferFullError, Cursor, varint
from protocol.patch.rans import STEP_SYMBOLS
from protocol.patch.values import Bits, Decoded, Layout

CHUNK_ELEMENTS: Final = 1 << 21
PIECE_ELEMENTS: Final = 1 << 17
"""Elements of a chunk that are decoded at a time, so that the caller's next step finds them in the processor's cache.
"""

MAX_MODEL_BYTES: Final = 2 + GROUPS * (3 + STEP_SYMBOLS)
MAX_DIRECTORY_BYTES: Final = 4 * (GROUPS + 2)  # of one chunk

SAMPLE_SHARE: Final = 1 / 16
MIN_SAMPLE: Final = 1 << 16
"""The model is fitted to the first changes: to SAMPLE_SHARE of the number of elements, but to at least MIN_SAMPLE. Each
takes 8 bytes of memory.
"""

GIVE_UP_RATIO: Final = 1.25
"""The encoder gives up if the size of the first chunks promises a frame of so many times the maximum size."""


def chunks_of(elements: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks of so many elements as (index of the first element, index behind the last)."""
    for begin in range(0, elements, CHUNK_ELEMENTS):
        yield begin, min(begin + CHUNK_ELEMENTS, elements)


class Scratch:
    """The scratch memory of one thread, reused for all tensors. The operating system provides memory only for the parts
    that are written. The sections of a chunk, `words` and `raw`, use the same memory as `unsorted`, one after the
    other.
    """

    def __init__(self) -> None:
        self._changes = np.empty(0, np.uint64)
        self._joined = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self.unsorted = np.empty(CHUNK_ELEMENTS + 1, np.uint64)  # the changes of one chunk in the order of the elements
        self.words = self.unsorted.view(np.uint16)[: 2 * CHUNK_ELEMENTS]
        self.raw = self.unsorted.view(np.uint32)
        self.sizes = np.empty(BLOCK, np.uint32)  # of one block of a dense frame
        self.symbols = np.empty(CHUNK_ELEMENTS, np.uint16)
        self.classes = np.empty(VECTOR_SIZE, np.uint8)  # of one vector of elements

    def joined(self, number: int, tensors: Sequence[Bits]) -> Bits:
        """Copy tensors side by side into one of two arrays, and return it; it overwrites the last such array."""
        size, dtype = sum(bits.size for bits in tensors), tensors[0].dtype
        if size * dtype.itemsize > self._joined[number].size:
            self._joined[number] = np.empty(size * dtype.itemsize, np.uint8)
        array: Bits = self._joined[number][: size * dtype.itemsize].view(dtype)
        return np.concatenate(tensors, out=array)

    def changes(self, size: int) -> NDArray[np.uint64]:
        """Return an array for at least `size` changes; it overwrites the array of the last call."""
        if size > self._changes.size:
            self._changes = np.empty(size, np.uint64)
        return self._changes


def _padded_tail(bits: Bits) -> Bits:
    """Return the elements behind the last whole vector, padded with zeros."""
    # Old and new elements get the same padding, so it has no change.
    vector: Bits = np.zeros(VECTOR_SIZE, bits.dtype)
    vector[: bits.size % VECTOR_SIZE] = bits[bits.size // VECTOR_SIZE * VECTOR_SIZE :]
    return vector


_ChunkChanges = tuple[NDArray[np.uint64], NDArray[np.int64]]
"""The changes of one chunk, sorted by group, and their number by group: int64[GROUPS]."""


class _Encoder:
    """The encoder of one tensor's changes, with so many classes (0 for none) from the exponent `first` on."""

    def __init__(self, layout: Layout, first: int, classes: int, scratch: Scratch) -> None:
        self._layout, self._first, self._classes = layout, first, classes
        self._scratch = scratch
        self._form, self._order = form_of(layout, first, classes), layout.order
        self._statistics = Statistics()

    def find(self, old: Bits, new: Bits, buffer: NDArray[np.uint64], *, learn: bool) -> _ChunkChanges:
        """Find the changes of a chunk; `learn`: add them to the statistics, to which the model is fitted."""
        whole = old.size // VECTOR_SIZE * VECTOR_SIZE
        parts = [(old[:whole], new[:whole])]
        if whole < old.size:
            parts.append((_padded_tail(old), _padded_tail(new)))
        return (self._find_by_class if self._classes else self._find_all)(parts, buffer, learn)

    def _find_by_class(self, parts: list[tuple[Bits, Bits]], buffer: NDArray[np.uint64], learn: bool) -> _ChunkChanges:
        counts, gaps = np.zeros(GROUPS, np.int64), np.zeros(MAX_CLASSES, np.int64)
        state = self._form, self._order, self._scratch.classes, gaps, self._scratch.unsorted, counts
        count = 0
        for old, new in parts:
            count = scan(old, new, *state)
        # In the order of the elements so far. The coder needs group after group, as each has tables of its own.
        sort(self._scratch.unsorted, count, np.cumsum(counts) - counts, buffer)
        if learn:
            # The kernel counts elements up to each group's last change; `gaps` has minus the number of those behind.
            tally(buffer, count, self._statistics.elements, self._statistics.steps)
            self._statistics.elements -= gaps
        return buffer[:count], counts

    def _find_all(self, parts: list[tuple[Bits, Bits]], buffer: NDArray[np.uint64], learn: bool) -> _ChunkChanges:
        counts, gap, count = np.zeros(GROUPS, np.int64), np.zeros(1, np.int64), 0
        symbols = self._statistics.steps[0] if learn else np.zeros(STEP_SYMBOLS, np.int64)
        for old, new in parts:
            count = scan_all(old, new, self._order, gap, buffer, count, symbols)
        counts[0] = count
        if learn:
            self._statistics.elements[0] += sum(old.size for old, _ in parts)
        return buffer[:count], counts

    def model(self) -> Model:
        """Return the model that fits the statistics."""
        return self._statistics.model(self._layout, self._first, self._classes)

    def code(
        self, chunk: _ChunkChanges, model: Model, tables: tuple[NDArray[np.uint64], ...], sections: BoundedBuffer
    ) -> bytes:
        """Append the sections of a chunk to `sections`, and return the chunk's directory entry."""
        changes, counts = chunk
        head = b"".join(map(varint, counts[: len(model.groups)].tolist()))
        if not changes.size:
            return head
        out, raw = self._scratch.words, self._scratch.raw  # the same memory
        gaps, steps = tables
        flat = (gaps.ravel(), steps.ravel(), gaps.shape[1], steps.shape[1])
        begin = put_changes(changes, counts, model.buckets, model.symbols, *flat, out)
        if begin == BUFFER_FULL:
            raise BufferFullError
        # The words are copied before the raw bits overwrite them.
        words = out[begin:].astype("<u2", copy=False)
        sections.put(words.data.cast("B"))
        bits = put_raw(changes, counts, model.buckets, model.symbols, raw)
        nbytes = (bits + 7) // 8
        sections.put(raw[: bits // 32 + 1].astype("<u4", copy=False).data.cast("B")[:nbytes])
        return head + varint(words.size) + varint(nbytes)


def encode_sparse(
    old: Bits, new: Bits, layout: Layout, scratch: Scratch, below: int, *, classes: bool
) -> tuple[int, memoryview]:
    """Encode a sparse frame of a tensor's flat old and new elements; return the number of changes, and the frame. Only
    floats have classes. BufferFullError if it takes `below` bytes or more, so that another mode is better.

    The model is fitted to the changes of the first chunks (see SAMPLE_SHARE), which for most tensors are all chunks.
    """
    run = classes_of(sample_changes(old, new, layout), old.size) if classes else (0, 0)
    encoder = _Encoder(layout, *run, scratch)
    ranges = list(chunks_of(old.size))
    # 1. Find the changes of the first chunks until they are enough for a model. They are kept, and coded below.
    sample: list[_ChunkChanges] = []
    sample_size, target_size = 0, min(old.size, max(MIN_SAMPLE, int(SAMPLE_SHARE * old.size)))
    buffer = scratch.changes(target_size + min(old.size, CHUNK_ELEMENTS))
    for begin, end in ranges:
        sample.append(encoder.find(old[begin:end], new[begin:end], buffer[sample_size:], learn=True))
        sample_size += sample[-1][0].size
        if sample_size >= target_size:
            break
    # 2. Fit the model. It and the directory come before the sections, but the directory is known after all sections
    #    are coded: so the sections begin behind the largest possible head, and the head is put right before them.
    model = encoder.model()
    tables = model.encoder_tables()
    max_head = MAX_MODEL_BYTES + MAX_DIRECTORY_BYTES * len(ranges)
    directory, changes, sections = bytearray(write_model(model)), 0, BoundedBuffer(max_head + below)
    sections.size = max_head
    # 3. Code chunk after chunk. `sections` ends at the size that the frame must stay below.
    for number, (begin, end) in enumerate(ranges):
        if number < len(sample):
            chunk = sample[number]
        else:
            chunk = encoder.find(old[begin:end], new[begin:end], buffer, learn=False)
        directory += encoder.code(chunk, model, tables, sections)
        changes += chunk[0].size
        # The first chunks tell what the others will cost: a frame that would lose against another mode ends here.
        if number + 1 == len(sample) and (sections.size - max_head) * old.size > GIVE_UP_RATIO * below * end:
            raise BufferFullError
    # The head was reserved at its largest size, so only now the size of the frame is known.
    frame = sections.frame(directory, max_head)
    if len(frame) >= below:
        raise BufferFullError
    return changes, frame


@dataclass(frozen=True, slots=True)
class Chunk:
    """The directory entry of one chunk."""

    begin: int  # index of the first element
    end: int  # index behind the last element
    counts: tuple[int, ...]  # number of changes of each group
    words: int  # number of 16-bit words of the first section
    raw: int  # bytes of the second section
    offset: int  # of the first section in the frame, in bytes

    @property
    def nbytes(self) -> int:
        """Size of both sections in bytes."""
        return 2 * self.words + self.raw


def _read_chunk(cursor: Cursor, begin: int, end: int, model: Model, offset: int) -> Chunk:
    counts = tuple(cursor.varint(end - begin) for _ in model.groups)
    if sum(counts) > end - begin:
        raise PatchError(f"{sum(counts)} changes in elements {begin} to {end}")
    if not any(counts):
        return Chunk(begin, end, counts, 0, 0, offset)
    # No encoder writes sections that are much longer than the elements; the decoder reserves memory for them.
    longest = (end - begin) * model.layout.bits // 8 + 512
    return Chunk(begin, end, counts, cursor.varint(longest), cursor.varint(longest), offset)


def read_directory(frame: memoryview, elements: int, changes: int, layout: Layout) -> tuple[Model, list[Chunk]]:
    """Read model and directory of a sparse frame (hostile bytes), which has as many changes as the table says."""
    cursor = Cursor(frame, "sparse frame")
    model = read_model(cursor, layout)
    chunks: list[Chunk] = []
    offset = 0
    for begin, end in chunks_of(elements):
        chunks.append(_read_chunk(cursor, begin, end, model, offset))
        offset += chunks[-1].nbytes
    # All counts and lengths must agree with the table and with the frame, so no section lies outside of it.
    total = sum(sum(chunk.counts) for chunk in chunks)
    if total != changes:
        raise PatchError(f"{total} changes in the chunks where the table says {changes}")
    if cursor.offset + offset != len(frame):
        raise PatchError(f"sections of {offset} bytes in a frame of {len(frame)}")
    return model, [replace(chunk, offset=cursor.offset + chunk.offset) for chunk in chunks]


def padded(section: bytes | memoryview, dtype: str, count: int) -> NDArray[Any]:
    """Return a section as integers of a dtype, in the byte order of this machine, with so many zeros behind them."""
    width = np.dtype(dtype).itemsize
    data = bytearray().join((section, bytes(width * count + -len(section) % width)))
    return np.frombuffer(data, dtype).astype(f"u{width}", copy=False)


def decode_changes(
    sections: tuple[bytes | memoryview, bytes | memoryview], model: Model, counts: NDArray[np.int64], elements: int
) -> tuple[int, NDArray[np.uint64]]:
    """Decode the words and the raw bits of some elements, of which each group has so many changes; return a status and
    the changes, each group followed by one of the gap NEVER.
    """
    # The kernel reads a little ahead of its checks, so zeros follow both sections (`get_changes`).
    words, raw = padded(sections[0], "<u2", 8), padded(sections[1], "<u4", 4)
    changes = np.empty(int(counts.sum()) + GROUPS, np.uint64)
    tables = (model.buckets, model.symbols, *model.decoder_tables)
    return get_changes(elements, counts, words, raw, 8 * len(sections[1]), *tables, changes), changes


class Decoder:
    """The decoder of one sparse frame: hostile bytes, whose directory was checked."""

    def __init__(self, frame: memoryview, model: Model) -> None:
        self._frame, self._model = frame, model
        self._order = model.layout.order
        self._classes = np.empty(VECTOR_SIZE, np.uint8)
        # For a caller that keeps no piece, such as the publisher's own check.
        self._scratch: Bits = np.empty(PIECE_ELEMENTS, f"u{model.layout.bits // 8}")
        # The last vector of a piece may reach behind it, where only a hostile frame has changes.
        self._places = np.empty(PIECE_ELEMENTS + VECTOR_SIZE, np.int64)

    def _changes(self, chunk: Chunk) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Decode the chunk's changes; return them sorted by group, and the index at which each group begins."""
        counts, middle = np.zeros(GROUPS, np.int64), chunk.offset + 2 * chunk.words
        counts[: len(chunk.counts)] = chunk.counts
        changes = np.full(GROUPS, NEVER << 33, np.uint64)
        if counts.any():
            sections = self._frame[chunk.offset : middle], self._frame[middle : middle + chunk.raw]
            status, changes = decode_changes(sections, self._model, counts, chunk.end - chunk.begin)
            _check(status, chunk)
        return changes, np.cumsum(counts + 1) - counts - 1

    def pieces(self, chunk: Chunk, old: Bits, new: Bits | None) -> Iterator[Decoded]:
        """Yield the chunk's new elements and the indices of the changed ones, piece by piece; PatchError if the
        sections do not fit the chunk's old elements. The decoded elements may take the place of the old ones; without
        an array for them, each piece is valid only until the next one is requested. Indices are in any case.
        """
        # All changes are decoded before the first element is written: 8 bytes for each, of at most 2^21. Then a cursor
        # and a gap for each group go on from piece to piece.
        changes, cursor = self._changes(chunk)
        ends = cursor + np.array([*chunk.counts, *[0] * (GROUPS - len(chunk.counts))])
        gaps = (changes[cursor] >> np.uint64(33)).astype(np.int64)
        state = self._order, changes, cursor
        for begin in range(0, old.size, PIECE_ELEMENTS):
            source = old[begin : begin + PIECE_ELEMENTS]
            target = self._scratch[: source.size] if new is None else new[begin : begin + PIECE_ELEMENTS]
            if self._model.classes:
                place_count = self._apply(source, target, state, gaps, chunk)
            else:
                place_count = _check(apply_all(source, target, *state, self._places, gaps), chunk)
            yield chunk.begin + begin, target, self._places[:place_count]
        # A change that no piece has reached lies behind the chunk's last element of its class.
        if (cursor != ends).any():
            raise PatchError(f"{reasons[PAST_THE_END]}, in elements {chunk.begin} to {chunk.end}")

    def _apply(
        self, old: Bits, new: Bits, state: tuple[Bits, Bits, Bits], gaps: NDArray[np.int64], chunk: Chunk
    ) -> int:
        whole, places, form = new.size // VECTOR_SIZE * VECTOR_SIZE, self._places, self._model.form
        place_count = _check(apply_changes(old[:whole], new[:whole], form, *state, places, self._classes, gaps), chunk)
        if whole < new.size:
            # In a copy that is padded to a whole vector. A change of the padding would be one behind the end.
            tail = _padded_tail(old)
            more = _check(apply_changes(tail, tail, form, *state, places[place_count:], self._classes, gaps), chunk)
            if tail[new.size - whole :].any():
                raise PatchError(f"{reasons[PAST_THE_END]}, in elements {chunk.begin} to {chunk.end}")
            new[whole:] = tail[: new.size - whole]
            places[place_count : place_count + more] += whole
            place_count += more
        return place_count


def _check(status: int, chunk: Chunk) -> int:
    """Return what a kernel returned; raise PatchError if it is a status."""
    if status < 0:
        raise PatchError(f"{reasons[status]}, in elements {chunk.begin} to {chunk.end}")
    return status
