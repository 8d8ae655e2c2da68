"""The changes that a frame of any mode gives are the difference of the tensors: places and values, each once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.digest import tensor_digest
from protocol.patch.container import CHECK_BYTES, Mode, TensorRow
from protocol.patch.dense import encode_steps
from protocol.patch.frames import encode_rows
from protocol.patch.plain_frames import encode_planes, encode_raw, encode_small_changes
from protocol.patch.sparse import Scratch, encode_sparse
from protocol.patch.values import bits_of, layout_of
from tests.patch.weights import DTYPES, SPECIAL, check_changes, from_bits, pairs, rounded_update

SCRATCH = Scratch()
ANY_SIZE = [mode for mode in Mode if mode not in (Mode.UNCHANGED, Mode.SMALL_CHANGES, Mode.JOINED)]


def check_mode(old: torch.Tensor, new: torch.Tensor, mode: Mode, *, classes: bool = False) -> None:
    """Check the changes of a frame of a mode, which need not be the smallest one."""
    before, after, layout, shape = bits_of(old), bits_of(new), layout_of(old.dtype), tuple(old.shape)
    places, below = np.flatnonzero(before != after), 16 * before.nbytes + 1024
    if mode == Mode.SPARSE:
        frame = encode_sparse(before, after, layout, SCRATCH, below, classes=classes and layout.is_float)[1]
    elif mode == Mode.SMALL_CHANGES:
        frame = encode_small_changes(before, after, places, layout, below)
    elif mode == Mode.ROWS:
        if not places.size:
            return
        if len(shape) < 2:
            old, new, shape = old.reshape(-1, 1), new.reshape(-1, 1), (old.numel(), 1)
        touched = (before != after).reshape(shape[0], -1).any(axis=1)
        frame = encode_rows(before, after, touched, layout, "compact", SCRATCH, below)[1]
    elif mode == Mode.STEPS:
        frame = encode_steps(before, after, layout, SCRATCH, below)[1]
    elif mode == Mode.RAW:
        frame = encode_raw(after)
    else:
        frame = encode_planes(before, after, mode, level=1, below=below)
    row = TensorRow("w", old.dtype, shape, mode, places.size, len(frame), tensor_digest(new)[:CHECK_BYTES])
    check_changes(old, new, row, frame)


@given(pairs(), st.sampled_from(ANY_SIZE))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_any_elements_in_any_mode(pair: tuple[torch.Tensor, torch.Tensor], mode: Mode) -> None:
    old, new = pair
    if old.numel():
        for classes in (False, True):
            check_mode(old, new, mode, classes=classes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_few_changes_of_any_dtype(dtype: torch.dtype) -> None:
    patterns = np.resize(np.array(SPECIAL[dtype.itemsize], np.uint64), 150_001)
    changed = patterns.copy()
    changed[[0, 77, 65_536, 131_072, 150_000]] ^= np.uint64(1)
    check_mode(from_bits(patterns, dtype, (150_001,)), from_bits(changed, dtype, (150_001,)), Mode.SMALL_CHANGES)


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("share", [1.0, 100.0])
def test_a_sparse_frame_of_several_pieces_whose_last_vector_is_not_whole(share: float, classes: bool) -> None:
    check_mode(*rounded_update(1001, 331, share, seed=1), Mode.SPARSE, classes=classes)


@pytest.mark.parametrize("mode", ANY_SIZE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_which_every_element_is_replaced(mode: Mode, dtype: torch.dtype) -> None:
    patterns = np.random.default_rng(0).integers(0, 1 << (8 * dtype.itemsize), 70_001, dtype=np.uint64)
    old = from_bits(patterns, dtype, (70_001,))
    check_mode(old, from_bits(patterns ^ np.uint64(1), dtype, (70_001,)), mode, classes=True)
