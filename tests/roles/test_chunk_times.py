"""What a miner promises by the times of its chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.miner.chunk_times import ChunkTimes

SIZE, MOST, BUDGET = 4, 16, 20.0


def promise(times: ChunkTimes) -> int:
    return times.affordable(BUDGET, SIZE, MOST)


def test_a_miner_that_measured_nothing_promises_all():
    assert promise(ChunkTimes()) == MOST


@pytest.mark.parametrize("slow", [30.0, 100.0])
def test_a_machine_for_which_one_group_takes_as_long_as_a_chunk_soon_promises_whole_chunks_again(slow: float):
    times = ChunkTimes()
    times.add(SIZE, slow)  # other programs took the processor
    promises = []
    for _ in range(8):
        promises.append(promise(times))
        times.add(min(promises[-1], SIZE), 9.0 + 0.1 * promises[-1])
    assert promises[0] < SIZE
    assert promises[-1] == 2 * SIZE


@given(st.floats(0.0, 10.0), st.floats(0.1, 10.0), st.lists(st.integers(1, SIZE), max_size=8))
def test_what_is_promised_fits_on_a_machine_that_stays_as_fast(begin: float, group: float, sizes: list[int]):
    times = ChunkTimes()
    for size in (SIZE, *sizes):
        times.add(size, begin + group * size)
    groups = promise(times)
    chunks, rest = divmod(groups, SIZE)
    needed = chunks * (begin + group * SIZE) + (begin + group * rest if rest else 0.0)
    assert groups == 1 or needed <= BUDGET


def test_a_machine_that_has_become_slower_forgets_how_fast_it_was():
    times = ChunkTimes()
    times.add(SIZE, 8.0)
    assert promise(times) == 2 * SIZE
    times.add(1, 15.0)
    assert times.of(SIZE) == 15.0
    assert promise(times) == SIZE
