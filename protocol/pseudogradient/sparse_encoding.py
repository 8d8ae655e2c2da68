"""Frames of exact and of grid values: the encoder (docs/spec/pseudogradient.md, sections 4 and 5).

A part is cut into chunks of 2^21 elements, each with a model of its own, so memory does not grow with the part.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.kernels.simd import MAX_CLASSES, VECTOR_SIZE
from protocol.patch.container import varint
from protocol.patch.context_model import Model, Statistics, choose_classes, form_of, write_model
from protocol.patch.entropy_encoding import BUFFER_FULL, GROUPS, coders_for
from protocol.patch.sparse import CHUNK_ELEMENTS, Scratch
from protocol.patch.values import Layout
from protocol.pseudogradient.arithmetic import Floats
from protocol.pseudogradient.gate import BLOCK_ELEMENTS, gates
from protocol.pseudogradient.scanning import UNRANKED_BITS, scans

LAYOUT: Final = Layout(16, 7, 256, True, True)
"""The layout of BF16; a weight's class is its exponent."""

MIN_FLOOR: Final = 8
"""A grid's floor is at least this plus its fraction, so that steps are normal numbers."""

SAMPLE_PIECES: Final = 16
PIECE_ELEMENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class SparseCoding:
    """How visible entries are coded.

    Attributes:
        exact: whether values are sent as they are, in 32 bits; else on a grid.
        fraction: log2 of the grid steps in a BF16 unit in the last place, from 0 to 8; 0 for exact values.
    """

    exact: bool
    fraction: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a site encodes, flat: float32 [n] each. See `arithmetic.pseudo_gradient`."""

    base: Floats
    local: Floats
    feedback: Floats
    decay: float = 1.0

    def slice(self, begin: int, end: int) -> "Inputs":
        """Return a range of the elements, without a copy."""
        return Inputs(self.base[begin:end], self.local[begin:end], self.feedback[begin:end], self.decay)

    def padded(self, size: int) -> "Inputs":
        """Return a copy with zeros behind the last element."""
        base, local, feedback = (
            np.concatenate((own, np.zeros(size - own.size, np.float32)))
            for own in (self.base, self.local, self.feedback)
        )
        return Inputs(base, local, feedback, self.decay)

    def sample(self) -> "Inputs":
        """Return evenly spaced pieces, or everything if that is little."""
        if self.base.size <= SAMPLE_PIECES * PIECE_ELEMENTS:
            return self
        starts = np.linspace(0, self.base.size - PIECE_ELEMENTS, SAMPLE_PIECES).astype(np.int64).tolist()
        pieces = [self.slice(start, start + PIECE_ELEMENTS) for start in starts]
        return Inputs(
            np.concatenate([piece.base for piece in pieces]),
            np.concatenate([piece.local for piece in pieces]),
            np.concatenate([piece.feedback for piece in pieces]),
            self.decay,
        )


@dataclass(frozen=True, slots=True)
class _Gated:
    """What the gate finds; see `gate.gate_exact`."""

    codes: NDArray[np.uint32]
    residual: Floats
    tops: NDArray[np.uint16]
    marks: NDArray[np.uint16]


class SparseEncoder:
    """The encoder of one thread.

    Args:
        coding: how values are coded.
    """

    def __init__(self, coding: SparseCoding) -> None:
        self._coding = coding
        self._scratch = Scratch()
        self._sorted = np.empty(CHUNK_ELEMENTS + 1, np.uint64)
        self._unranked = np.empty(CHUNK_ELEMENTS * UNRANKED_BITS // 32 + 2 if coding.exact else 2, np.uint32)
        size = BLOCK_ELEMENTS
        self._block = _Gated(
            np.empty(size, np.uint32), np.empty(size, np.float32), np.empty(size, np.uint16), np.empty(size, np.uint16)
        )

    def encode(self, inputs: Inputs, residual: Floats) -> tuple[int, bytes]:
        """Encode a part.

        Args:
            residual: result: the error feedback after sending: float32 [n].

        Returns:
            The number of entries, and the frame.
        """
        entries, blobs = 0, []
        for begin in range(0, inputs.base.size, CHUNK_ELEMENTS):
            end = min(begin + CHUNK_ELEMENTS, inputs.base.size)
            count, blob = self._chunk(inputs.slice(begin, end), residual[begin:end])
            entries += count
            blobs.append(blob)
        return entries, b"".join(blobs) if entries else b""

    def _reference(self, inputs: Inputs) -> int:
        """Return the least exponent by which a chunk's grid is made; 0 for exact values."""
        if self._coding.exact:
            return 0
        sample = inputs.sample()
        update = (sample.base - sample.local) + np.float32(inputs.decay) * sample.feedback
        used = update[update != 0].astype(np.float64)
        root_mean_square = math.sqrt(float(np.mean(used * used))) if used.size else 0.0
        exponent = 134 + math.frexp(root_mean_square)[1] - 1 if root_mean_square else 0
        return min(254, max(MIN_FLOOR + self._coding.fraction, exponent))

    def _gate(self, inputs: Inputs, reference: int, out: _Gated) -> None:
        arrays = (inputs.base, inputs.local, inputs.feedback, np.float32(inputs.decay))
        results = (out.codes, out.residual, out.tops, out.marks)
        if self._coding.exact:
            gates().exact(*arrays, *results)
        else:
            gates().grid(*arrays, np.uint32(reference), np.uint32(self._coding.fraction), *results)

    def _classes(self, inputs: Inputs, reference: int) -> tuple[int, int]:
        sample, size = inputs.sample(), inputs.sample().base.size
        gated = _Gated(
            np.empty(size, np.uint32), np.empty(size, np.float32), np.empty(size, np.uint16), np.empty(size, np.uint16)
        )
        self._gate(sample, reference, gated)
        return choose_classes(gated.tops, gated.marks, LAYOUT)

    def _chunk(self, inputs: Inputs, residual: Floats) -> tuple[int, bytes]:
        """Encode a chunk; return the number of entries and the bytes."""
        reference = self._reference(inputs)
        first, classes = self._classes(inputs, reference)
        counts, gaps = np.zeros(GROUPS, np.int64), np.zeros(MAX_CLASSES, np.int64)
        filled, unsorted = np.zeros(3, np.uint64), self._scratch.unsorted
        form = form_of(LAYOUT, first, classes)
        grid = np.array((reference, self._coding.fraction, self._coding.exact), np.uint64)
        count = 0
        for begin in range(0, inputs.base.size, BLOCK_ELEMENTS):
            block = inputs.slice(begin, min(begin + BLOCK_ELEMENTS, inputs.base.size))
            size = block.base.size
            whole = -(-size // VECTOR_SIZE) * VECTOR_SIZE
            if whole != size:
                block = block.padded(whole)
            direct = whole == size
            own = _Gated(
                self._block.codes[:whole],
                residual[begin : begin + size] if direct else self._block.residual[:whole],
                self._block.tops[:whole],
                self._block.marks[:whole],
            )
            self._gate(block, reference, own)
            if not direct:
                residual[begin : begin + size] = own.residual[:size]
            bits = block.base.view(np.uint32)
            state = (form, grid, self._scratch.classes, gaps, unsorted, counts, self._unranked, filled)
            count = scans().scan(bits, own.codes, own.tops, own.marks, *state)
        if count == 0:
            return 0, varint(0)
        statistics, kernels, changes = Statistics(), coders_for(2), self._sorted[:count]
        kernels.sort(unsorted, count, np.cumsum(counts) - counts, changes)
        kernels.tally(changes, count, statistics.elements, statistics.steps)
        statistics.elements[1:] -= gaps
        model = statistics.model(LAYOUT, first, classes)
        head = varint(count) + (b"" if self._coding.exact else bytes((reference,))) + write_model(model)
        return count, head + self._sections(changes, counts, model, filled)

    def _sections(
        self, changes: NDArray[np.uint64], counts: NDArray[np.int64], model: Model, filled: NDArray[np.uint64]
    ) -> bytes:
        """Code the entries: counts of the classes, lengths, words, raw bits, values without a rank."""
        kernels, (gaps, steps) = coders_for(2), model.encoder_tables()
        tables = (model.buckets, model.symbols)
        out = self._scratch.words
        flat = (gaps.ravel(), steps.ravel(), gaps.shape[1], steps.shape[1])
        begin = kernels.put_changes(changes, counts, *tables, *flat, out)
        if begin == BUFFER_FULL:
            raise AssertionError("a model that is fitted to all entries of a chunk takes less than the chunk")
        words = out[begin:].astype("<u2").tobytes()
        bits = kernels.put_raw(changes, counts, *tables, self._scratch.raw)
        raw = self._scratch.raw[: bits // 32 + 1].astype("<u4").tobytes()[: (bits + 7) // 8]
        lengths = [*counts[1 : model.classes + 1].tolist(), len(words) // 2, len(raw)]
        unranked = b""
        if self._coding.exact:
            position, pending, fill = (int(number) for number in filled)
            self._unranked[position] = pending
            bits = 32 * position + fill
            unranked = self._unranked[: position + 1].astype("<u4").tobytes()[: (bits + 7) // 8]
            lengths.append(bits // UNRANKED_BITS)
        return b"".join((*map(varint, lengths), words, raw, unranked))
