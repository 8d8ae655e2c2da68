"""The published formats: functions over one tensor of 16-bit patterns, and functions that pack a whole update.

Sources: PULSE (arXiv 2602.03839v2, appendices C and H) for COO with u8 row and u16 column gaps and for flat int32 gaps;
SparseRL-Sync (arXiv 2605.07330, section 3.3) for int16 gaps and entropy-coded values; TRL's delta weight sync for raw
indices and values; slime for XOR with the previous tensor. Where a gap does not fit its type, a filler entry carries it
on.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import constriction
import lz4.frame
import numpy as np
import zstandard
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Encode = Callable[[Bits, Bits, int], bytes]
Decode = Callable[[Bits, bytes, int], Bits]


def _identity(data: bytes, old: Sequence[Bits]) -> bytes:
    return data


@dataclass(frozen=True)
class Format:
    """A published format.

    Attributes:
        plain, restore: one tensor to bytes, and back, given its old patterns and its columns.
        pack, unpack: the bytes of all tensors at once, given all old patterns.
    """

    name: str
    plain: Encode
    restore: Decode
    pack: Callable[[bytes, Sequence[Bits]], bytes] = _identity
    unpack: Callable[[bytes, Sequence[Bits]], bytes] = _identity

    def encode(self, old: Sequence[Bits], new: Sequence[Bits], columns: Sequence[int]) -> bytes:
        """Return an update of all tensors."""
        parts = [self.plain(*tensor) for tensor in zip(old, new, columns, strict=True)]
        return self.pack(b"".join(len(part).to_bytes(8, "little") + part for part in parts), old)

    def decode(self, old: Sequence[Bits], data: bytes, columns: Sequence[int]) -> list[Bits]:
        """Return the new patterns of all tensors."""
        update, offset, tensors = self.unpack(data, old), 0, []
        for before, width in zip(old, columns, strict=True):
            end = offset + 8 + int.from_bytes(update[offset : offset + 8], "little")
            tensors.append(self.restore(before, update[offset + 8 : end], width))
            offset = end
        return tensors


def _split(data: bytes, *dtypes: str) -> list[NDArray[Any]]:
    """Return arrays of these dtypes, each after its 8-byte length in elements."""
    arrays, offset = [], 0
    for dtype in dtypes:
        count = int.from_bytes(data[offset : offset + 8], "little")
        arrays.append(np.frombuffer(data, dtype, count, offset + 8))
        offset += 8 + count * np.dtype(dtype).itemsize
    return arrays


def _join(*arrays: NDArray[Any]) -> bytes:
    return b"".join(array.size.to_bytes(8, "little") + array.tobytes() for array in arrays)


def _changes(old: Bits, new: Bits) -> tuple[NDArray[np.int64], Bits]:
    indices = np.flatnonzero(old != new)
    return indices, new[indices]


def coo(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as PULSE's delta_coo_downscaled: row gaps u8, column gaps within a row u16 (absolute after a new row), raw
    values.
    """
    indices, values = _changes(old, new)
    rows, cols = indices // columns, indices % columns
    row_gaps = np.diff(rows, prepend=0)
    if row_gaps.size and row_gaps.max() > 255:
        raise ValueError("a gap of more than 255 rows")
    column_gaps = np.where(row_gaps > 0, cols, np.diff(cols, prepend=0))
    return _join(row_gaps.astype("u1"), column_gaps.astype("<u2"), values)


def from_coo(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `coo` encodes."""
    row_gaps, column_gaps, values = _split(data, "u1", "<u2", "<u2")
    rows = np.cumsum(row_gaps, dtype=np.int64)
    total = np.cumsum(column_gaps, dtype=np.int64)
    starts = np.flatnonzero((row_gaps > 0) | (np.arange(row_gaps.size) == 0))
    before = np.repeat(total[starts] - column_gaps[starts], np.diff(np.append(starts, row_gaps.size)))
    new = old.copy()
    new[rows * columns + total - before] = values
    return new


def flat(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as PULSE's delta_flat_int32: index gaps int32, raw values."""
    indices, values = _changes(old, new)
    return _join(np.diff(indices, prepend=0).astype("<i4"), values)


def from_flat(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `flat` encodes."""
    gaps, values = _split(data, "<i4", "<u2")
    new = old.copy()
    new[np.cumsum(gaps, dtype=np.int64)] = values
    return new


def trl(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as TRL: int32 indices and raw values, nothing else."""
    indices, values = _changes(old, new)
    return _join(indices.astype("<i4"), values)


def from_trl(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `trl` encodes."""
    indices, values = _split(data, "<i4", "<u2")
    new = old.copy()
    new[indices] = values
    return new


def sparse_rl(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as SparseRL-Sync: int16 gaps, and values by ANS with a static model of their high and low bytes."""
    indices, values = _changes(old, new)
    gaps = np.diff(indices, prepend=0)
    long_gaps = np.flatnonzero(gaps >= 1 << 15)
    parts = [gaps[gaps < 1 << 15].astype("<i2"), long_gaps.astype("<i8"), gaps[long_gaps].astype("<i8")]
    for plane in (values >> 8, values & 0xFF):
        counts = np.bincount(plane, minlength=256).astype(np.float32)
        coder = constriction.stream.stack.AnsCoder()
        model = constriction.stream.model.Categorical(counts + 1e-3, perfect=False)
        coder.encode_reverse(plane.astype(np.int32), model)
        parts += [counts.astype("<f4"), coder.get_compressed().astype("<u4")]
    return _join(np.array([values.size], "<i8"), *parts)


def from_sparse_rl(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `sparse_rl` encodes."""
    size, short, at, long_gaps, *planes = _split(data, "<i8", "<i2", "<i8", "<i8", "<f4", "<u4", "<f4", "<u4")
    values = np.zeros(int(size[0]), np.uint16)
    for shift, counts, words in ((8, planes[0], planes[1]), (0, planes[2], planes[3])):
        model = constriction.stream.model.Categorical(counts + np.float32(1e-3), perfect=False)
        decoded = constriction.stream.stack.AnsCoder(words.astype(np.uint32)).decode(model, values.size)
        values |= decoded.astype(np.uint16) << np.uint16(shift)
    gaps = np.zeros(values.size, np.int64)
    gaps[at] = long_gaps
    gaps[np.setdiff1d(np.arange(values.size), at, assume_unique=True)] = short
    new = old.copy()
    new[np.cumsum(gaps)] = values
    return new


def _zstd(level: int, plain: Encode, restore: Decode, name: str) -> Format:
    return Format(
        f"{name} + zstd-{level}",
        plain,
        restore,
        lambda data, old: zstandard.ZstdCompressor(level=level).compress(data),
        lambda data, old: zstandard.ZstdDecompressor().decompress(data),
    )


def xor(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as slime: the XOR of old and new."""
    return (old ^ new).tobytes()


def from_xor(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `xor` encodes."""
    new: Bits = old ^ np.frombuffer(data, "<u2")
    return new


def whole(old: Bits, new: Bits, columns: int) -> bytes:
    """Encode as the whole new tensor."""
    return new.tobytes()


def from_whole(old: Bits, data: bytes, columns: int) -> Bits:
    """Decode what `whole` encodes."""
    new: Bits = np.frombuffer(data, "<u2")
    return new


def _dictionary(old: Sequence[Bits]) -> zstandard.ZstdCompressionDict:
    together = b"".join(tensor.tobytes() for tensor in old)
    return zstandard.ZstdCompressionDict(together, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def patch_from(data: bytes, old: Sequence[Bits]) -> bytes:
    """Encode as `zstd --patch-from`: the new tensors with the old ones as a dictionary, window over both, level 1."""
    window = min(30, max(10, int(2 * len(data) - 1).bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window, enable_ldm=True)
    return zstandard.ZstdCompressor(dict_data=_dictionary(old), compression_params=parameters).compress(data)


def from_patch_from(data: bytes, old: Sequence[Bits]) -> bytes:
    """Decode what `patch_from` encodes."""
    return zstandard.ZstdDecompressor(dict_data=_dictionary(old), max_window_size=1 << 31).decompress(data)


FORMATS: Final = (
    _zstd(1, coo, from_coo, "PULSE COO"),
    _zstd(3, coo, from_coo, "PULSE COO"),
    Format(
        "PULSE COO + lz4",
        coo,
        from_coo,
        lambda data, old: lz4.frame.compress(data),
        lambda data, old: lz4.frame.decompress(data),
    ),
    Format(
        "PULSE COO + gzip-6",
        coo,
        from_coo,
        lambda data, old: gzip.compress(data, 6),
        lambda data, old: gzip.decompress(data),
    ),
    _zstd(1, flat, from_flat, "flat int32 gaps"),
    Format("SparseRL-Sync gaps + ANS", sparse_rl, from_sparse_rl),
    Format("TRL raw", trl, from_trl),
    Format("zstd --patch-from", whole, from_whole, patch_from, from_patch_from),
    _zstd(1, xor, from_xor, "slime XOR"),
)
