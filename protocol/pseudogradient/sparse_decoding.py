"""Frames of exact and of grid values: the decoder, which mirrors sparse_encoding.py. The bytes may be hostile."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError, MalformedError
from protocol.kernels.simd import MAX_CLASSES, VECTOR_SIZE
from protocol.patch.container import Cursor
from protocol.patch.context_model import Model, form_of, read_model
from protocol.patch.entropy_decoding import LEAVES_CLASS, LEFT_OVER, PAST_THE_END, decoders_for, reasons
from protocol.patch.entropy_encoding import GROUPS
from protocol.patch.sparse import CHUNK_ELEMENTS
from protocol.pseudogradient.arithmetic import Floats, Lanes
from protocol.pseudogradient.placing import placer
from protocol.pseudogradient.scanning import UNRANKED_BITS, BlockScratch
from protocol.pseudogradient.sparse_encoding import LAYOUT, MIN_FLOOR, WORDS, SparseCoding

_WHERE: Final = "sparse frame"
_reasons: Final = {**reasons, LEAVES_CLASS: "a value that changes no BF16 weight"}


def decode_sparse(frame: memoryview, base: Floats, coding: SparseCoding, entries: int, squares: Lanes) -> Floats:
    """Decode a part.

    Args:
        frame: hostile bytes.
        base: the shared weights: float32 [n].
        entries: the number of entries that the head states.
        squares: to which the squares of the values are added, see `SquaredNorm`.

    Returns:
        The values, zeros where nothing was sent: float32 [n].

    Raises:
        MalformedError, LimitError, ContributionError: the frame does not have the form in
            docs/spec/pseudogradient.md, or not so many entries.
    """
    if not entries:
        if len(frame):
            raise MalformedError("bytes where nothing was sent", _WHERE)
        return np.zeros(base.size, np.float32)
    out = np.empty(base.size, np.float32)
    cursor, count, block = Cursor(frame, _WHERE), 0, BlockScratch()
    for begin in range(0, base.size, CHUNK_ELEMENTS):
        end = min(begin + CHUNK_ELEMENTS, base.size)
        count += _decode_chunk(cursor, base[begin:end], coding, _Output(block, squares, out[begin:end]))
    cursor.finish()
    if count != entries:
        raise ContributionError(f"{count} entries in the chunks where the head says {entries}", _WHERE)
    return out


@dataclass(frozen=True, slots=True)
class _Output:
    """Where the values of a chunk go: float32 [n]; and the sums of the squares of all values."""

    block: BlockScratch
    squares: Lanes
    values: Floats


def _decode_chunk(cursor: Cursor, base: Floats, coding: SparseCoding, out: _Output) -> int:
    """Decode a chunk; return the number of its entries."""
    count = cursor.varint(base.size)
    if count == 0:
        out.values[:] = 0
        return 0
    reference = 0 if coding.exact else cursor.byte()
    if not coding.exact and not MIN_FLOOR + coding.fraction <= reference <= 254:
        raise MalformedError(f"a reference exponent of {reference}", _WHERE)
    model = read_model(cursor, LAYOUT)
    if not model.classes:
        raise MalformedError("a chunk without classes", _WHERE)
    counts = np.zeros(GROUPS, np.int64)
    for group in range(1, model.classes + 1):
        counts[group] = cursor.varint(base.size)
    if int(counts.sum()) != count:
        raise ContributionError(f"{int(counts.sum())} entries in the classes of {count}", _WHERE)
    longest = 4 * base.size + 512
    words, raw = cursor.varint(longest), cursor.varint(longest)
    unranked = cursor.varint(count) if coding.exact else 0
    changes = _decode_changes(cursor, model, counts, (words, raw), base.size)
    bits = cursor.take((UNRANKED_BITS * unranked + 7) // 8)
    if len(bits) and bits[-1] >> ((UNRANKED_BITS * unranked - 1) % 8 + 1):
        raise MalformedError("bits behind the last value without a rank", _WHERE)
    grid = np.array((reference, coding.fraction, coding.exact), np.uint64)
    forms = form_of(WORDS, model.first, model.classes), grid
    _place(base, forms, (changes, counts), (bits, unranked), out)
    return count


def _decode_changes(
    cursor: Cursor, model: Model, counts: NDArray[np.int64], lengths: tuple[int, int], elements: int
) -> NDArray[np.uint64]:
    kernels = decoders_for(2)
    sections = cursor.take(2 * lengths[0]), cursor.take(lengths[1])
    words, raw = np.zeros(lengths[0] + 8, np.uint16), np.zeros(lengths[1] // 4 + 5, "<u4")
    words[: lengths[0]] = np.frombuffer(sections[0], "<u2")
    raw.view(np.uint8)[: lengths[1]] = np.frombuffer(sections[1], np.uint8)
    changes = np.empty(int(counts.sum()) + GROUPS, np.uint64)
    tables = (model.buckets, model.symbols, *model.decoder_tables())
    raw = raw.astype(np.uint32, copy=False)
    _check(kernels.get_changes(elements, counts, words, raw, 8 * lengths[1], *tables, changes))
    return changes


def _place(
    base: Floats,
    forms: tuple[NDArray[np.uint64], NDArray[np.uint64]],
    entries: tuple[NDArray[np.uint64], NDArray[np.int64]],
    unranked: tuple[bytes | memoryview, int],
    out: _Output,
) -> None:
    """Write the values to their places.

    Args:
        forms: `form` and `grid` of `scanning.scan`.
        entries: those of all classes, and how many each class has.
        unranked: the bits of the values without a rank, and how many these are.
    """
    changes, counts = entries
    cursor = np.cumsum(counts + 1) - counts - 1
    ends = cursor + counts
    gaps = (changes[cursor] >> np.uint64(33)).astype(np.int64)[1:].copy()
    bits = np.frombuffer(bytes(unranked[0]) + bytes(8 + -len(unranked[0]) % 4), "<u4").astype(np.uint32)
    position = np.array((0, unranked[1]), np.uint64)  # in the bits of values without a rank: read, remaining
    scratch = (out.block.words, out.block.entries, out.block.masks, out.block.classes)
    state = (*forms, changes, cursor, gaps, *scratch, bits, position, out.squares)
    whole = base.size // VECTOR_SIZE * VECTOR_SIZE
    _check(placer()(base[:whole].view(np.uint32), *state, out.values[:whole]))
    if whole < base.size:
        tail, values = np.zeros(VECTOR_SIZE, np.float32), np.empty(VECTOR_SIZE, np.float32)
        tail[: base.size - whole] = base[whole:]
        _check(placer()(tail.view(np.uint32), *state, values))
        if values[base.size - whole :].any():
            raise ContributionError(_reasons[PAST_THE_END], _WHERE)
        out.values[whole:] = values[: base.size - whole]
    if (cursor != ends).any():
        raise ContributionError(_reasons[PAST_THE_END], _WHERE)
    if position[1]:
        raise ContributionError(_reasons[LEFT_OVER], _WHERE)


def _check(status: int) -> None:
    if status:
        raise ContributionError(_reasons[status], _WHERE)


assert MAX_CLASSES + 1 == GROUPS
