"""The largest entries of a chunk are chosen, and their indices take the entropy of a subset."""

import math

import numpy as np
import pytest

from protocol.pseudogradient.chunk_frames import decode_chunks, encode_chunks, quantize
from protocol.pseudogradient.chunks import LEVELS
from protocol.pseudogradient.subsets import SLOTS, slot_tables


def entropy(elements: int, chosen: int) -> float:
    """Return log2 of the number of subsets."""
    return math.log2(math.comb(elements, chosen))


@pytest.mark.parametrize("chosen", [32, 128, 512])
def test_indices_take_at_most_a_hundredth_more_than_their_entropy(chosen: int) -> None:
    update = np.random.default_rng(0).standard_normal(256 * 4096).astype(np.float32)
    entries, frame = encode_chunks(update.copy(), [(1024, 1024)], chosen)
    assert entries == 256 * chosen
    index_bits = 8 * (len(frame) - 16) - 2 * entries
    assert index_bits / 256 < 1.01 * entropy(4096, chosen)


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (100, 130), (1,), (), (3, 5, 7), (65, 1), (5000,)])
@pytest.mark.parametrize("chosen", [1, 128, 1024])
def test_the_largest_of_each_chunk_are_sent(shape: tuple[int, ...], chosen: int) -> None:
    update = np.random.default_rng(1).standard_normal(math.prod(shape)).astype(np.float32)
    rest = update.copy()
    entries, frame = encode_chunks(rest, [shape], chosen)
    decoded_values = decode_chunks(memoryview(frame), [shape], chosen)
    assert np.array_equal(update - decoded_values, rest)
    matrix, values = (a.reshape(shape[0] if len(shape) > 1 else 1, -1) for a in (update, decoded_values))
    height, width = (64, 64) if len(shape) > 1 else (1, 4096)
    count = 0
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            chunk = np.abs(matrix[top : top + height, left : left + width]).ravel()
            own = (values[top : top + height, left : left + width] != 0).ravel()
            k = max(1, chosen * chunk.size // 4096)
            assert set(np.flatnonzero(own)) == set(np.argsort(-chunk, kind="stable")[:k])
            count += k
    assert count == entries


def test_of_equal_entries_the_first_are_sent() -> None:
    update = np.ones(4096, np.float32)
    update[4000] = -2.0
    _, frame = encode_chunks(update.copy(), [(4096,)], 4)
    decoded_values = decode_chunks(memoryview(frame), [(4096,)], 4)
    assert np.flatnonzero(decoded_values).tolist() == [0, 1, 2, 4000]


def test_levels_are_the_means_of_their_bins() -> None:
    values = np.concatenate((np.full(10, -1.0), np.full(10, 1.0), np.full(1, 9.0))).astype(np.float32)
    levels, lookup = quantize(values)
    for level in range(LEVELS):
        own = values[levels == level]
        assert lookup[level] == (np.float32(own.mean()) if own.size else 0)


def test_slots_are_whole_and_probabilities_hypergeometric() -> None:
    tables = slot_tables(128)
    for level, chosen in [(2, 2), (6, 3), (6, 63), (9, 100), (12, 128)]:
        half, at = 1 << (level - 1), int(tables.offsets[level, chosen])
        least, most = max(0, chosen - half), min(chosen, half)
        edges = tables.slots[at : at + most - least + 2].astype(int)
        assert edges[0] == 0
        assert edges[-1] == SLOTS
        widths = np.diff(edges)
        assert (widths > 0).all()
        exact = [math.comb(half, x) * math.comb(half, chosen - x) for x in range(least, most + 1)]
        shares = np.array([value / sum(exact) for value in exact])
        assert np.abs(widths / SLOTS - shares).max() < 0.002
