"""Frames of exact and of grid values: the decoder, which mirrors sparse_encoding.py. The bytes may be hostile."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ContributionError, MalformedError
from protocol.kernels.simd import MAX_CLASSES, VECTOR_SIZE
from protocol.patch.container import Cursor
from protocol.patch.context_model import Model, read_model
from protocol.patch.entropy_decoding import LEAVES_CLASS, PAST_THE_END, decoders_for, reasons
from protocol.patch.entropy_encoding import GROUPS
from protocol.patch.sparse import CHUNK_ELEMENTS
from protocol.pseudogradient.arithmetic import Floats
from protocol.pseudogradient.gate import BLOCK_ELEMENTS
from protocol.pseudogradient.scanning import UNRANKED_BITS, scans
from protocol.pseudogradient.sparse_encoding import LAYOUT, MIN_FLOOR, SparseCoding

_WHERE: Final = "sparse frame"
_reasons: Final = {**reasons, LEAVES_CLASS: "a value that changes no BF16 weight"}


def decode_sparse(frame: memoryview, base: Floats, coding: SparseCoding, entries: int) -> Floats:
    """Decode a part.

    Args:
        frame: hostile bytes.
        base: the shared weights: float32 [n].
        entries: the number of entries that the head states.

    Returns:
        The values, zeros where nothing was sent: float32 [n].

    Raises:
        MalformedError, LimitError, ContributionError: the frame does not have the form in
            docs/spec/pseudogradient.md, or not so many entries.
    """
    out = np.zeros(base.size, np.float32)
    if not entries:
        if len(frame):
            raise MalformedError("bytes where nothing was sent", _WHERE)
        return out
    cursor, count = Cursor(frame, _WHERE), 0
    for begin in range(0, base.size, CHUNK_ELEMENTS):
        end = min(begin + CHUNK_ELEMENTS, base.size)
        count += _decode_chunk(cursor, base[begin:end], coding, out[begin:end])
    cursor.finish()
    if count != entries:
        raise ContributionError(f"{count} entries in the chunks where the head says {entries}", _WHERE)
    return out


def _decode_chunk(cursor: Cursor, base: Floats, coding: SparseCoding, out: Floats) -> int:
    """Decode a chunk into `out`; return the number of its entries."""
    count = cursor.varint(base.size)
    if count == 0:
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
    grid = np.array((reference, coding.fraction, coding.exact), np.uint64)
    incomplete = _place(base, model, grid, changes, counts, out)
    if coding.exact:
        _complete(base, incomplete, cursor.take((UNRANKED_BITS * unranked + 7) // 8), unranked, out)
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
    model: Model,
    grid: NDArray[np.uint64],
    changes: NDArray[np.uint64],
    counts: NDArray[np.int64],
    out: Floats,
) -> NDArray[np.uint8]:
    """Write the values to their places; return which vectors have values without a rank."""
    cursor = np.cumsum(counts + 1) - counts - 1
    ends = cursor + counts
    gaps = (changes[cursor] >> np.uint64(33)).astype(np.int64)[1:].copy()
    classes, tops = np.empty(VECTOR_SIZE, np.uint8), np.empty(BLOCK_ELEMENTS, np.uint16)
    incomplete = np.zeros(-(-base.size // VECTOR_SIZE), np.uint8)
    whole = base.size // VECTOR_SIZE * VECTOR_SIZE
    state = (model.form, grid, changes, cursor, classes, gaps)
    bits = base.view(np.uint32)
    for begin in range(0, whole, BLOCK_ELEMENTS):
        end = min(begin + BLOCK_ELEMENTS, whole)
        np.right_shift(bits[begin:end], 16, out=tops[: end - begin], casting="unsafe")
        _check(
            scans().place(
                bits[begin:end], tops[: end - begin], *state, out[begin:end], incomplete[begin // VECTOR_SIZE :]
            )
        )
    if whole < base.size:
        tail, values = np.zeros(VECTOR_SIZE, np.uint32), np.zeros(VECTOR_SIZE, np.float32)
        tail[: base.size - whole] = bits[whole:]
        _check(scans().place(tail, (tail >> np.uint32(16)).astype(np.uint16), *state, values, incomplete[-1:]))
        if values[base.size - whole :].any():
            raise ContributionError(_reasons[PAST_THE_END], _WHERE)
        out[whole:] = values[: base.size - whole]
    if (cursor != ends).any():
        raise ContributionError(_reasons[PAST_THE_END], _WHERE)
    return incomplete


def _complete(base: Floats, incomplete: NDArray[np.uint8], data: bytes | memoryview, count: int, out: Floats) -> None:
    padded = np.frombuffer(bytes(data) + bytes(8 + -len(data) % 4), "<u4").astype(np.uint32)
    _check(scans().complete(base.view(np.uint32), incomplete, padded, count, out.view(np.uint32)))
    if data and data[-1] >> ((UNRANKED_BITS * count - 1) % 8 + 1):
        raise MalformedError("bits behind the last value without a rank", _WHERE)


def _check(status: int) -> None:
    if status:
        raise ContributionError(_reasons[status], _WHERE)


assert MAX_CLASSES + 1 == GROUPS
