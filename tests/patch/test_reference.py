"""The kernels write what the reference writes, word for word; that they read it back is tested by round trips."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.patch.model import fit, plain, uniform
from protocol.patch.rangecoder import survival_table
from protocol.patch.room import OutOfRoomError
from protocol.patch.sparse import Workspace, encode_sparse, read_directory
from protocol.patch.values import bits_of, layout_of, ordered, unordered
from tests.patch import reference
from tests.patch.weights import DTYPES, from_bits, pairs


def test_the_survival_table_is_exact():
    assert survival_table().tolist() == reference.SURVIVAL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_orders_agree_and_invert(dtype):
    layout = layout_of(dtype)
    patterns = np.unique(np.linspace(0, (1 << layout.bits) - 1, 1 << min(16, layout.bits)).astype(np.uint64))
    bits = bits_of(from_bits(patterns, dtype, (len(patterns),)))
    keys = ordered(bits, layout)
    assert keys.tolist() == [reference.order(int(value), layout) for value in bits]
    assert unordered(keys, layout).tolist() == bits.tolist()


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(pairs(), st.booleans())
def test_kernels_write_the_reference_words(pair, fast):
    layout = layout_of(pair[0].dtype)
    old, new = bits_of(pair[0]), bits_of(pair[1])
    if old.size == 0 or (old == new).all():
        return
    model = uniform(old, new, layout) if fast or not layout.is_float else fit(old, new, layout)
    try:
        changed, frame = encode_sparse(old, new, tuple(pair[0].shape), model, Workspace(), below=1 << 20)
    except OutOfRoomError:
        return
    parsed, chunks = read_directory(memoryview(frame), tuple(pair[0].shape), changed, layout)
    assert parsed == model
    adaptive = reference.Adaptive(*(array.tolist() for array in model.adaptive_bits()))
    unclassed = reference.Adaptive(*(array.tolist() for array in plain(layout).adaptive_bits()))
    weights = model.weights.tolist() if model.firsts else []
    parts = reference.encode_chunk(
        old.tolist(), new.tolist(), layout, model.classes.tolist(), weights, model.listed_weight, adaptive, unclassed
    )
    data = b""
    for part in parts:
        if part.count:
            for words in (part.waits.finish(), part.steps.finish()):
                data += np.array(words, dtype="<u2").tobytes()
            data += part.raw_bytes()
    assert [part.count for part in parts] == [chunks[0].listed.count, chunks[0].classed.count]
    assert frame[chunks[0].offset :] == data
