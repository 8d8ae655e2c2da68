"""The kernels write the same words as the reference, and the round-trip tests show that they read them; SIMD operations
do what plain Python does.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.kernels import simd
from protocol.kernels.jit import kernel
from protocol.patch import rans
from protocol.patch.context_model import MAX_CODE, weight_of
from protocol.patch.dense import encode_steps
from protocol.patch.fields import BufferFullError, Cursor
from protocol.patch.sparse import Scratch, encode_sparse, read_directory
from protocol.patch.values import bits_of, from_keys, layout_of, to_keys
from tests.patch import reference
from tests.patch.weights import DTYPES, from_bits, pairs


def test_the_tables_of_gaps_are_exact():
    for code in range(MAX_CODE + 1):
        weight = weight_of(code)
        assert rans.bucket_bits(weight) == reference.bucket_bits(weight)
        assert list(rans.gap_widths(weight)) == reference.gap_widths(weight)
        assert sum(rans.gap_widths(weight)) == rans.SLOTS
        assert min(rans.gap_widths(weight)) > 0


@given(st.lists(st.integers(0, MAX_CODE).map(weight_of), min_size=2, max_size=rans.STEP_SYMBOLS + 1))
def test_the_tables_of_steps_are_exact(weights):
    widths = rans.step_widths(tuple(weights))
    assert list(widths) == reference.step_widths(weights)
    assert sum(widths) == rans.SLOTS
    assert min(widths) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_agree_and_round_trip(dtype):
    layout = layout_of(dtype)
    patterns = np.unique(np.linspace(0, (1 << layout.bits) - 1, 1 << min(16, layout.bits)).astype(np.uint64))
    bits = bits_of(from_bits(patterns, dtype, (len(patterns),)))
    keys = to_keys(bits, layout)
    assert keys.tolist() == [reference.key_of(int(value), layout) for value in bits]
    assert from_keys(keys, layout).tolist() == bits.tolist()


@settings(max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.booleans())
def test_kernels_write_the_reference_words(pair, fast):
    layout = layout_of(pair[0].dtype)
    old, new = bits_of(pair[0]), bits_of(pair[1])
    if old.size == 0 or (old == new).all():
        return
    classes = layout.is_float and not fast
    try:
        changes, frame = encode_sparse(old, new, layout, Scratch(), 1 << 20, classes=classes)
    except BufferFullError:
        return
    model, chunks = read_directory(memoryview(frame), old.size, changes, layout)
    assert bool(model.classes) == classes
    groups = [reference.Group(weight_of(group.code), [*map(weight_of, group.steps)]) for group in model.groups]
    reference.find_changes(old.tolist(), new.tolist(), layout, model.first, groups)
    words, raw = reference.encode_chunk(groups)
    assert [len(group.changes) for group in groups] == list(chunks[0].counts)
    assert frame[chunks[0].offset :] == np.array(words, dtype="<u2").tobytes() + raw


@settings(max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs())
def test_kernels_write_the_reference_words_of_a_dense_frame(pair):
    layout, old, new = layout_of(pair[0].dtype), bits_of(pair[0]), bits_of(pair[1])
    if not old.size:
        return
    _, frame = encode_steps(old, new, layout, Scratch(), 1 << 20)
    cursor, tables = Cursor(frame, "frame"), []
    classes, first = cursor.byte(), cursor.byte()
    for _ in range(classes):
        unchanged, growing = cursor.byte(), cursor.byte()
        steps = [weight_of(code) if code else 0 for code in cursor.take(cursor.byte())]
        tables.append(reference.dense_widths(weight_of(unchanged), growing, steps))
    words, raw = reference.encode_dense_chunk(old.tolist(), new.tolist(), layout, first, tables)
    assert (cursor.varint(1 << 20), cursor.varint(1 << 20)) == (len(words), len(raw))
    assert frame[cursor.offset :] == np.array(words, dtype="<u2").tobytes() + raw


# SIMD operations, compared with plain Python


def _places(nth_one: Any) -> Any:
    def places(mask: Any, count: Any, out: Any) -> Any:
        for number in range(count):
            out[number] = nth_one(mask, np.uint64(number))
        return 0

    return kernel(places)


@pytest.mark.parametrize("name", ["nth_one", "_nth_one_by_halves"])
def test_places_of_the_ones_of_a_mask(name: str) -> None:
    random, places = np.random.default_rng(0), _places(getattr(simd, name))
    masks = [1, 1 << 63, (1 << 64) - 1, *random.integers(0, 1 << 64, 50, np.uint64).tolist()]
    masks += [mask & other for mask, other in pairwise(masks)]
    for mask in masks:
        ones = [place for place in range(64) if mask >> place & 1]
        out = np.zeros(64, np.uint64)
        places(np.uint64(mask), len(ones), out)
        assert out[: len(ones)].tolist() == ones
