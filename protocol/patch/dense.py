"""Dense frames: a symbol for each element (docs/spec/patch.md, section 4), for tensors of which many elements change.

Each chunk of 2^21 elements is coded independently: a model, the lengths of two sections, words, raw bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import MalformedError, PatchError
from protocol.kernels.simd import MAX_CLASSES
from protocol.patch.context_model import MAX_CODE, WEIGHTS, classes_of, codes_of, form_of, sample_changes
from protocol.patch.dense_coding import BLOCK, LANES, MARGIN, SYMBOLS, decode_elements, describe, put_symbols
from protocol.patch.entropy_decoding import LEFT_OVER, NOT_A_CODE, fill_rows, reasons
from protocol.patch.entropy_encoding import ENTRY, fill_entries
from protocol.patch.fields import BufferFullError, Cursor, varint
from protocol.patch.rans import MIN_STATE, SLOTS, STATE_WORDS, STEP_SYMBOLS
from protocol.patch.sparse import CHUNK_ELEMENTS, PIECE_ELEMENTS, Scratch, padded
from protocol.patch.values import Bits, Decoded, Layout

SAMPLE_ELEMENTS: Final = 1 << 13

_WHERE: Final = "dense frame"


@dataclass(frozen=True, slots=True)
class StepModel:
    """The model of a chunk, with a row for each class.

    Attributes:
        first: exponent of the first class.
        unchanged: the code of the weight of unchanged elements: uint8 [classes].
        growing: share of the changes that go away from zero, in 256ths, from 1 on: uint8 [classes].
        steps: the code of the weight of each step symbol, 0 if it does not occur: uint8 [classes, STEP_SYMBOLS].
    """

    first: int
    unchanged: NDArray[np.uint8]
    growing: NDArray[np.uint8]
    steps: NDArray[np.uint8]

    def widths(self) -> NDArray[np.uint32]:
        """Return the slots of each symbol: uint32 [classes, SYMBOLS]."""
        weights, steps = np.zeros((len(self.steps), SYMBOLS), np.int64), WEIGHTS[self.steps]
        up = np.maximum(1, steps * self.growing[:, None] >> 8)
        weights[:, 0] = WEIGHTS[self.unchanged]
        weights[:, 2 : 2 * STEP_SYMBOLS + 2 : 2] = up
        weights[:, 3 : 2 * STEP_SYMBOLS + 3 : 2] = np.maximum(1, steps - up)
        weights[:, 2 : 2 * STEP_SYMBOLS + 2] *= np.repeat(self.steps > 0, 2, axis=1)
        # As `rans.step_widths`, for all classes at once.
        spare = SLOTS - (weights > 0).sum(axis=1, keepdims=True)
        widths = (weights > 0) + weights * spare // weights.sum(axis=1, keepdims=True)
        widths[np.arange(len(widths)), weights.argmax(axis=1)] += SLOTS - widths.sum(axis=1)
        slots: NDArray[np.uint32] = widths.astype(np.uint32)
        return slots


def _fit(first: int, counts: NDArray[np.int64]) -> StepModel:
    """Return the model that fits the counts of the symbols: int64 [classes, SYMBOLS]."""
    pairs = counts[:, 2 : 2 * STEP_SYMBOLS + 2].reshape(len(counts), -1, 2)
    totals = pairs.sum(axis=2)
    elements = counts.sum(axis=1, keepdims=True)
    steps = np.maximum(1, codes_of(totals, elements)) * (totals > 0)
    # A class without changes still has one step symbol, so that no symbol has all slots.
    steps[~totals.any(axis=1), 0] = 1
    growing = 256 * pairs[:, :, 0].sum(axis=1) // np.maximum(1, totals.sum(axis=1))
    unchanged = codes_of(counts[:, :1], elements)[:, 0]
    return StepModel(first, unchanged, np.clip(growing, 1, 255).astype(np.uint8), steps.astype(np.uint8))


def _write_model(model: StepModel) -> bytes:
    parts = [bytes((len(model.steps), model.first))]
    for unchanged, growing, steps in zip(model.unchanged, model.growing, model.steps, strict=True):
        number = int(np.flatnonzero(steps)[-1]) + 1
        parts.append(bytes((unchanged, growing, number)) + steps[:number].tobytes())
    return b"".join(parts)


def _read_model(cursor: Cursor, layout: Layout) -> StepModel:
    """Read a model from hostile bytes."""
    classes, first = cursor.byte(), cursor.byte()
    if not 0 < classes <= MAX_CLASSES or first + classes > layout.exponents:
        raise MalformedError(f"{classes} classes from exponent {first} on", _WHERE)
    heads, steps = np.zeros((classes, 2), np.uint8), np.zeros((classes, STEP_SYMBOLS), np.uint8)
    for number in range(classes):
        heads[number] = cursor.byte(), cursor.byte()
        codes = cursor.take(cursor.byte())
        if not 0 < len(codes) <= STEP_SYMBOLS or not codes[-1] or not heads[number, 1]:
            raise MalformedError(f"{len(codes)} symbols of steps", _WHERE)
        steps[number, : len(codes)] = list(codes)
    if max(heads[:, 0].max(), steps.max()) > MAX_CODE:
        raise MalformedError("a weight out of range", _WHERE)
    return StepModel(first, heads[:, 0], heads[:, 1], steps)


def encode_steps(old: Bits, new: Bits, layout: Layout, scratch: Scratch, below: int) -> tuple[int, memoryview]:
    """Encode a dense frame of flat old and new elements; return the number of changes, and the frame. BufferFullError
    if it takes `below` bytes or more, so that another mode is better.
    """
    pieces, nbytes, changes = list[bytes](), 0, 0
    # The classes are chosen from a sample of the elements.
    stride = max(1, old.size // SAMPLE_ELEMENTS) | 1  # odd: of a power of two, the sample would be a few columns
    counts = sample_changes(np.ascontiguousarray(old[::stride]), np.ascontiguousarray(new[::stride]), layout)
    form = form_of(layout, *(classes_of(counts) if layout.is_float else (0, 1)))
    for begin in range(0, old.size, CHUNK_ELEMENTS):
        own = slice(begin, begin + CHUNK_ELEMENTS)
        changes += _encode_chunk(old[own], new[own], form, layout, scratch, pieces)
        nbytes = sum(map(len, pieces))
        if nbytes >= below:
            raise BufferFullError
    return changes, memoryview(b"".join(pieces))


def _encode_chunk(
    old: Bits, new: Bits, form: NDArray[np.uint64], layout: Layout, scratch: Scratch, pieces: list[bytes]
) -> int:
    """Append the pieces of a chunk; return the number of its changes."""
    symbols, classes = scratch.symbols[: old.size], int(form[4])
    tables = np.zeros((4, classes * SYMBOLS), np.uint32)
    bits = describe((old, new), form, layout.order, (scratch.sizes, symbols, scratch.raw), tables)
    # Copied before the words overwrite them.
    raw = scratch.raw[: bits // 32 + 1].astype("<u4", copy=False).view(np.uint8)[: (bits + 7) // 8].tobytes()
    counts = tables.sum(axis=0, dtype=np.int64).reshape(classes, SYMBOLS)
    model = _fit(int(form[2]), counts)
    entries = np.zeros((classes, ENTRY * SYMBOLS), np.uint64)
    fill_entries(model.widths(), entries)
    out = scratch.words[: old.size + STATE_WORDS * LANES]
    begin = put_symbols(symbols, entries.ravel(), np.empty(LANES, np.uint64), out)
    words = out[begin:].astype("<u2", copy=False).tobytes()
    pieces += [_write_model(model), varint(len(words) // 2), varint(len(raw)), words, raw]
    return old.size - int(counts[:, 0].sum())


def decode_steps(
    old: Bits, frame: memoryview, changes: int, layout: Layout, target: Bits | None, *, places: bool
) -> Iterator[Decoded]:
    """Decode hostile bytes, which have as many changes as the table says: yield the new elements of a flat tensor,
    written to the target if there is one, and the indices of the changed ones if `places`, piece by piece. A
    ProtocolError says where the frame breaks the spec.
    """
    cursor, found = Cursor(frame, _WHERE), 0
    for begin in range(0, old.size, CHUNK_ELEMENTS):
        chunk = _Chunk(cursor, old[begin : begin + CHUNK_ELEMENTS].size, layout)
        for start in range(begin, min(old.size, begin + CHUNK_ELEMENTS), PIECE_ELEMENTS):
            own = slice(start, min(start + PIECE_ELEMENTS, begin + CHUNK_ELEMENTS))
            source = old[own]
            new = np.empty_like(source) if target is None else target[own]
            symbols = chunk.decode(source, new)
            found += int(np.count_nonzero(symbols))
            yield start, new, np.flatnonzero(symbols) if places else np.empty(0, np.int64)
        chunk.finish()
    cursor.finish()
    if found != changes:
        raise PatchError(f"{found} changes where the table says {changes}", _WHERE)


class _Chunk:
    """The decoder of one chunk of so many elements; see `decode_steps`."""

    def __init__(self, cursor: Cursor, elements: int, layout: Layout) -> None:
        model = _read_model(cursor, layout)
        self._order, self._form = layout.order, form_of(layout, model.first, len(model.steps))
        self._table = np.empty((len(model.steps), SLOTS), np.uint32)
        fill_rows(model.widths(), self._table)
        # An element has at most one word, and fewer raw bits than a word of 32 bits.
        lengths = cursor.varint(elements + STATE_WORDS * LANES), cursor.varint(4 * elements)
        if lengths[0] < STATE_WORDS * LANES:
            raise MalformedError("words without the states", _WHERE)
        self._words = padded(cursor.take(2 * lengths[0]), "<u2", MARGIN)
        self._raw = padded(cursor.take(lengths[1]), "<u4", MARGIN)
        heads = self._words[: STATE_WORDS * LANES].astype(np.uint64).reshape(LANES, STATE_WORDS)
        self._states = np.append(heads[:, 0] << np.uint64(16) | heads[:, 1], np.uint64(STATE_WORDS * LANES))
        # From a state below the range a decoder reads a word that no encoder moves out: a second form of the frame.
        if (self._states[:LANES] < MIN_STATE).any():
            self._check(NOT_A_CODE)
        self._bits = np.array((0, 8 * lengths[1]), np.uint64)
        self._block = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint32)
        self._symbols = np.empty(min(elements, PIECE_ELEMENTS), np.uint8)

    def decode(self, old: Bits, new: Bits) -> NDArray[np.uint8]:
        """Decode the next elements; return their symbols, of which 0 is that of an unchanged one: uint8 [n]."""
        symbols = self._symbols[: old.size]
        sections = self._words, self._table.ravel(), self._states, self._raw, self._bits
        self._check(decode_elements((old, new), self._form, self._order, sections, self._block, symbols))
        return symbols

    def finish(self) -> None:
        """Check that the sections end here, in the states with which an encoder begins."""
        if self._states[LANES] != self._words.size - MARGIN or (self._bits[0] + np.uint64(7)) // 8 * 8 != self._bits[1]:
            self._check(LEFT_OVER)
        # The last byte's remaining bits are 0.
        place, used = divmod(int(self._bits[0]), 32)
        if (self._states[:LANES] != MIN_STATE).any() or int(self._raw[place]) >> used:
            self._check(NOT_A_CODE)

    def _check(self, status: int) -> None:
        if status < 0:
            raise PatchError(reasons[status], _WHERE)
