"""Dense frames have one form, their models fit large chunks, and frames of rows take little memory."""

from typing import Any

import numpy as np
import pytest
import torch

from protocol.errors import MalformedError, PatchError, ProtocolError
from protocol.patch import dense, dense_coding
from protocol.patch.container import Mode, TensorRow
from protocol.patch.dense import decode_steps, encode_steps
from protocol.patch.entropy_decoding import CUT_OFF
from protocol.patch.fields import Cursor, varint
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import Scratch, encode_sparse, read_directory
from protocol.patch.values import layout_of

BF16 = layout_of(torch.bfloat16)
SCRATCH = Scratch()


def _decode(frame: bytes, old: Any, changes: int) -> Any:
    new = np.empty_like(old)
    for _ in decode_steps(old, memoryview(frame), changes, BF16, new, places=False):
        pass
    return new


def test_a_state_below_the_range_is_refused() -> None:
    old, new = np.array([0x3F80], np.uint16), np.array([0x3F81], np.uint16)
    changes, frame = encode_steps(old, new, BF16, SCRATCH, 1 << 20)
    assert _decode(bytes(frame), old, changes) == new
    cursor = Cursor(frame, "frame")
    begin = int(dense._read_model(cursor, BF16).widths()[0, 0])
    # State 0 is one into which the encoder moves a word that it need not move.
    words = [0, begin + 1, *[1, 0] * 7, 0]
    forged = bytes(frame[: cursor.offset]) + varint(17) + varint(0) + np.array(words, "<u2").tobytes()
    with pytest.raises(PatchError, match="no encoder writes"):
        _decode(forged, old, changes)


def test_bits_behind_the_raw_bits_are_refused() -> None:
    old, new = np.array([0x3F80], np.uint16), np.array([0x3F89], np.uint16)
    changes, frame = encode_steps(old, new, BF16, SCRATCH, 1 << 20)
    assert _decode(bytes(frame), old, changes) == new
    with pytest.raises(PatchError, match="no encoder writes"):
        _decode(bytes(frame[:-1]) + bytes((frame[-1] | 0x80,)), old, changes)


def test_rows_of_one_element_are_refused() -> None:
    old, rows = np.zeros(4096, np.uint16), varint(1) + varint(2) + bytes((1, 0)) + bytes((Mode.RAW, 1, 0))
    row = TensorRow("w", torch.bfloat16, (4096,), Mode.ROWS, 1, len(rows), bytes(8))
    with pytest.raises(MalformedError, match="one dimension"):
        list(decode_frame(row, memoryview(rows), old))


@pytest.mark.parametrize("changed", [1, 3])
def test_planes_of_another_number_of_changes_are_refused(changed: int) -> None:
    row = TensorRow("w", torch.bfloat16, (4,), Mode.RAW, changed, 8, bytes(8))
    with pytest.raises(PatchError, match="2 changes"):
        list(decode_frame(row, memoryview(bytes((1, 0, 0, 0, 0, 0, 2, 0))), np.zeros(4, np.uint16)))


def test_a_model_fits_the_counts_of_a_whole_chunk() -> None:
    random, size = np.random.default_rng(1), 1 << 21
    old = random.integers(0x3F80, 0x4000, size).astype(np.uint16)
    changes, frame = encode_steps(old, old + (random.random(size) < 0.15), BF16, SCRATCH, 1 << 30)
    share = changes / size
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert 8 * len(frame) < 1.01 * entropy * size


@pytest.mark.parametrize("size", [1, 7, 8, 9, (1 << 17) + 1, (1 << 21) - 1, (1 << 21) + 1])
def test_any_bits_round_trip(size: int) -> None:
    old, new = np.random.default_rng(size).integers(0, 1 << 16, (2, size), np.uint16)
    new[0], old[0] = 0xFFFF, 0x7FFF  # the smallest and the largest key
    changes, frame = encode_steps(old, new, BF16, SCRATCH, 1 << 30)
    assert (_decode(bytes(frame), old, changes) == new).all()


def test_mutated_dense_frames_are_refused_or_decoded() -> None:
    random = np.random.default_rng(2)
    old = random.integers(0, 1 << 16, 64).astype(np.uint16)
    changes, frame = encode_steps(old, old ^ random.integers(0, 64, 64).astype(np.uint16), BF16, SCRATCH, 1 << 20)
    guarded = np.full(64 + 32, 0xA5A5, np.uint16)
    for _ in range(2000):
        mutant = bytearray(frame)
        for place in random.integers(0, len(mutant), random.integers(1, 4)).tolist():
            mutant[place] = random.integers(0, 256)
        try:
            for _ in decode_steps(old, memoryview(mutant), changes, BF16, guarded[16:80], places=True):
                pass
        except ProtocolError:
            pass
        assert (guarded[:16] == 0xA5A5).all() and (guarded[80:] == 0xA5A5).all()


def test_bits_behind_the_raw_bits_of_a_sparse_frame_are_refused() -> None:
    old = np.full(1 << 15, 0x3F80, np.uint16)
    new = old.copy()
    new[7::400] += 1
    changes, frame = encode_sparse(old, new, BF16, SCRATCH, 1 << 20, classes=False)
    model, chunks = read_directory(frame, old.size, changes, BF16)
    width = int(model.buckets[0, 0]) + 1  # of a change: its sign and the lower bits of its gap
    assert width * changes % 8 and chunks[0].raw == -(-width * changes // 8)
    row = TensorRow("w", torch.bfloat16, (old.size,), Mode.SPARSE, changes, len(frame), bytes(8))
    forged = bytes(frame[:-1]) + bytes((frame[-1] | 0x80,))
    assert np.array_equal(np.concatenate([new.copy() for _, new, _ in decode_frame(row, frame, old)]), new)
    with pytest.raises(PatchError, match="no encoder writes"):
        list(decode_frame(row, memoryview(forged), old))


def test_a_row_without_a_change_is_refused() -> None:
    old = np.zeros(64, np.uint16)
    inner = varint(3) + varint(2)  # one change, in the first of the touched rows
    one, two = (varint(n) + varint(1) + bytes((numbers, Mode.SMALL_CHANGES)) + inner for n, numbers in ((1, 1), (2, 3)))
    row = TensorRow("w", torch.bfloat16, (4, 16), Mode.ROWS, 1, len(one), bytes(8))
    assert sum(places.size for _, _, places in decode_frame(row, memoryview(one), old)) == 1
    with pytest.raises(PatchError, match="without a change"):
        list(decode_frame(row, memoryview(two), old))


def test_raw_bits_of_the_widest_symbols_are_read_within_the_margin() -> None:
    """A frame without raw bits, all of whose symbols have 29 each: nothing behind the margin is read."""
    memory = np.full(2 * dense_coding.MARGIN, 0xFFFFFFFF, np.uint32)
    memory[: dense_coding.MARGIN] = 0
    sizes, symbols = np.zeros(64, np.uint32), np.full(64, 246, np.uint8)
    status = dense_coding.get_sizes(symbols, memory[: dense_coding.MARGIN], np.zeros(2, np.uint64), sizes)
    assert status == CUT_OFF
    assert not sizes.any()
