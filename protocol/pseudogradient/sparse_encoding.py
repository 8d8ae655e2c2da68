"""Frames of exact and of grid values: the encoder (docs/spec/pseudogradient.md, sections 4 and 5).

A part is cut into chunks of 2^21 elements, each with a model of its own, so memory does not grow with the part.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError
from protocol.kernels.simd import MAX_CLASSES, VECTOR_SIZE
from protocol.patch.context_model import Model, Statistics, classes_of, form_of, write_model
from protocol.patch.entropy_encoding import BUFFER_FULL, GROUPS, put_changes, put_raw, sort, tally
from protocol.patch.fields import varint
from protocol.patch.sparse import CHUNK_ELEMENTS, Scratch
from protocol.patch.values import Layout
from protocol.pseudogradient.arithmetic import Floats, Lanes
from protocol.pseudogradient.scanning import BLOCK_ELEMENTS, UNRANKED_BITS, block_scratch, sample, scan

LAYOUT: Final = Layout(16, 7, 256, True, True)
"""The layout of BF16; a weight's class is its exponent."""

WORDS: Final = Layout(32, 23, 256, True, True)
"""The same classes for the bit patterns of float32."""

MIN_FLOOR: Final = 8
"""A grid's floor is at least this plus its fraction, so that steps are normal numbers."""

SAMPLE_PIECES: Final = 16
PIECE_ELEMENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class SparseCoding:
    """How visible entries are coded."""

    exact: bool  # whether values are sent as they are, in 32 bits; else on a grid
    fraction: int  # log2 of the grid steps in a BF16 unit in the last place, from 0 to 8; 0 for exact values


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a site encodes, flat: float32 [n] each. See `arithmetic.pseudo_gradient`."""

    base: Floats
    local: Floats
    feedback: Floats
    decay: float = 1.0

    @property
    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Base, local weights and feedback, as kernels take them."""
        return self.base, self.local, self.feedback

    def slice(self, begin: int, end: int) -> "Inputs":
        """Return a range of the elements, without a copy."""
        return Inputs(self.base[begin:end], self.local[begin:end], self.feedback[begin:end], self.decay)

    def padded(self, size: int) -> "Inputs":
        """Return a copy with zeros behind the last element."""
        zeros = np.zeros(size - self.base.size, np.float32)
        base, local, feedback = (np.concatenate((own, zeros)) for own in self.arrays)
        return Inputs(base, local, feedback, self.decay)

    def sample(self) -> "Inputs":
        """Return evenly spaced pieces, or everything if that is little."""
        if self.base.size <= SAMPLE_PIECES * PIECE_ELEMENTS:
            return self
        # Spread over the chunk, since tensors differ, and rows too.
        starts = np.linspace(0, self.base.size - PIECE_ELEMENTS, SAMPLE_PIECES).astype(np.int64).tolist()
        pieces = [self.slice(start, start + PIECE_ELEMENTS) for start in starts]
        base, local, feedback = map(np.concatenate, zip(*(piece.arrays for piece in pieces), strict=True))
        return Inputs(base, local, feedback, self.decay)


class _EntryList:
    """The entries of a chunk, in an array for all, as far as it was scanned; see `scanning.scan`."""

    def __init__(self, grid: NDArray[np.uint64], changes: NDArray[np.uint64], squares: Lanes) -> None:
        self.grid, self.changes, self.squares = grid, changes, squares
        self.counts, self.gaps = np.zeros(GROUPS, np.int64), np.zeros(MAX_CLASSES, np.int64)
        self.filled = np.zeros(3, np.uint64)


class SparseEncoder:
    """The encoder of one thread."""

    def __init__(self, coding: SparseCoding) -> None:
        self._coding = coding
        self._scratch, self._block = Scratch(), block_scratch()
        self._sorted = np.empty(CHUNK_ELEMENTS + 1, np.uint64)
        self._unranked = np.empty(CHUNK_ELEMENTS * UNRANKED_BITS // 32 + 2 if coding.exact else 2, np.uint32)

    def encode(self, inputs: Inputs, residual: Floats, squares: Lanes) -> tuple[int, bytes]:
        """Encode a part; return the number of entries, and the frame. `residual` gets the error feedback after sending,
        float32 [n]; the squares of what is sent are added to `squares`, see `SquaredNorm`.
        """
        entries, blobs = 0, []
        for begin in range(0, inputs.base.size, CHUNK_ELEMENTS):
            end = min(begin + CHUNK_ELEMENTS, inputs.base.size)
            count, blob = self._chunk(inputs.slice(begin, end), residual[begin:end], squares)
            entries += count
            blobs.append(blob)
        return entries, b"".join(blobs) if entries else b""

    def _reference(self, sample: Inputs) -> int:
        """Return the least exponent by which a chunk's grid is made; 0 for exact values."""
        if self._coding.exact:
            return 0
        # The exponent whose BF16 unit, 2^(r - 134), is the root mean square of the update, rounded down to a power of
        # two. `frexp` returns an exponent that is larger by 1, as its mantissa is below 1.
        update = (sample.base - sample.local) + np.float32(sample.decay) * sample.feedback
        used = update[update != 0].astype(np.float64)
        root_mean_square = math.sqrt(float(np.mean(used * used))) if used.size else 0.0
        exponent = 134 + math.frexp(root_mean_square)[1] - 1 if root_mean_square else 0
        return min(254, max(MIN_FLOOR + self._coding.fraction, exponent))

    def _scan(self, inputs: Inputs, residual: Floats, form: NDArray[np.uint64], listing: _EntryList) -> int:
        """Append the entries of some elements to the list; return their total number."""
        size = inputs.base.size
        whole = size // VECTOR_SIZE * VECTOR_SIZE
        count = 0
        # Whole vectors, then the tail in a copy that is padded with zeros: they are invisible, so no entry is added.
        for begin, end in ((0, whole), (whole, size)):
            if begin == end:
                continue
            own = inputs.slice(begin, end) if end == whole else inputs.slice(begin, end).padded(VECTOR_SIZE)
            out = residual[begin:end] if end == whole else np.empty(VECTOR_SIZE, np.float32)
            lists, bits = (listing.changes, listing.counts, listing.gaps), (self._unranked, listing.filled)
            constants = (np.float32(own.decay), form, listing.grid)
            count = scan(own.arrays, *constants, out, self._block, lists, bits, listing.squares)
            if count < 0:
                raise ContributionError("values that are not finite", "an update")
            residual[begin:end] = out[: end - begin]
        return count

    def _chunk(self, inputs: Inputs, residual: Floats, squares: Lanes) -> tuple[int, bytes]:
        """Encode a chunk; return the number of entries and the bytes."""
        # 1. What must be known before the pass: the grid and the classes, from a sample.
        part = inputs.sample()
        reference = self._reference(part)
        grid = np.array((reference, self._coding.fraction, self._coding.exact), np.uint64)
        changes = self._scratch.unsorted
        first, classes = self._classes(part, grid)
        # 2. One pass over the elements collects the entries and leaves the error feedback.
        listing = _EntryList(grid, changes, squares)
        count = self._scan(inputs, residual, form_of(WORDS, first, classes), listing)
        if count == 0:
            return 0, varint(0)
        # 3. From here on they are coded like the changes of a patch: sorted by class, with a model fitted to all.
        statistics, ordered = Statistics(), self._sorted[:count]
        sort(changes, count, np.cumsum(listing.counts) - listing.counts, ordered)
        tally(ordered, count, statistics.elements, statistics.steps)
        statistics.elements -= listing.gaps
        model = statistics.model(LAYOUT, first, classes)
        head = varint(count) + (b"" if self._coding.exact else bytes((reference,))) + write_model(model)
        return count, head + self._sections(ordered, listing.counts, model, listing.filled)

    def _classes(self, inputs: Inputs, grid: NDArray[np.uint64]) -> tuple[int, int]:
        """Choose the classes of a chunk by the exponents of the entries in a sample of it."""
        # A sample without entries still gives one class, into which all elements fall.
        counts, residual = np.zeros((2, LAYOUT.exponents), np.int64), np.empty(BLOCK_ELEMENTS, np.float32)
        sample(inputs.arrays, np.float32(inputs.decay), grid, residual, self._block, counts)
        return classes_of(counts)

    def _sections(
        self, changes: NDArray[np.uint64], counts: NDArray[np.int64], model: Model, filled: NDArray[np.uint64]
    ) -> bytes:
        """Code the entries: counts of the classes, lengths, words, raw bits, values without a rank."""
        words, raw = code_entries(changes, counts, model, self._scratch)
        lengths = [*counts[: model.classes].tolist(), len(words) // 2, len(raw)]
        unranked = b""
        if self._coding.exact:
            position, pending, fill = (int(number) for number in filled)
            self._unranked[position] = pending
            bits = 32 * position + fill
            unranked = self._unranked[: position + 1].astype("<u4").tobytes()[: (bits + 7) // 8]
            lengths.append(bits // UNRANKED_BITS)
        return b"".join((*map(varint, lengths), words, raw, unranked))


def code_entries(
    changes: NDArray[np.uint64], counts: NDArray[np.int64], model: Model, scratch: Scratch
) -> tuple[bytes, bytes]:
    """Code sorted entries, of which each group has so many; return the words and the raw bits."""
    gaps, steps = model.encoder_tables()
    out = scratch.words
    flat = (gaps.ravel(), steps.ravel(), gaps.shape[1], steps.shape[1])
    begin = put_changes(changes, counts, model.buckets, model.symbols, *flat, out)
    # A patch's encoder would take another mode here. An entry takes less than the 4 bytes of its element.
    if begin == BUFFER_FULL:
        raise AssertionError("a model that is fitted to all entries of a chunk takes less than the chunk")
    # The words are copied before the raw bits overwrite them: both sections use the same memory.
    words = out[begin:].astype("<u2").tobytes()
    bits = put_raw(changes, counts, model.buckets, model.symbols, scratch.raw)
    return words, scratch.raw[: bits // 32 + 1].astype("<u4").tobytes()[: (bits + 7) // 8]
