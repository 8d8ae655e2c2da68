"""Tests of roles/gather.py: order, concurrency, and what a failure ends."""

import pytest
import trio

from protocol.errors import ProtocolError
from roles.gather import fetch_ahead, first_success, gather
from roles.ports import EngineError, StoreError
from tests.support.simulation.virtual_clock import simulated


@simulated
async def test_results_come_in_the_order_of_the_items_and_few_tasks_run_at_once():
    active, max_active = 0, 0

    async def square(item: int) -> int:
        nonlocal active, max_active
        active += 1
        max_active = max(max_active, active)
        await trio.sleep(10.0 - item)
        active -= 1
        return item * item

    assert await gather(square, range(10), at_once=3) == [item * item for item in range(10)]
    assert max_active == 3
    assert await gather(square, []) == []


@pytest.mark.parametrize("cancel_others", [True, False])
def test_after_a_failure_nothing_is_begun_and_others_end_or_are_cancelled(cancel_others: bool):
    starts: list[int] = []
    ends: list[int] = []

    async def task(item: int) -> None:
        starts.append(item)
        if item == 1:
            await trio.sleep(1.0)
            raise EngineError("broken")
        await trio.sleep(5.0)
        ends.append(item)

    async def scenario() -> None:
        with pytest.raises(EngineError):
            await gather(task, range(10), at_once=3, errors=(EngineError,), cancel_others=cancel_others)
        assert starts == [0, 1, 2]
        assert sorted(ends) == ([] if cancel_others else [0, 2])

    simulated(scenario)()


@simulated
async def test_the_next_items_are_fetched_while_one_is_used():
    starts: list[float] = []
    results: list[int] = []

    async def fetch(item: int) -> int:
        starts.append(trio.current_time())
        await trio.sleep(10.0)
        return item * item

    async def use(item: int, result: int) -> None:
        assert result == item * item
        results.append(item)
        await trio.sleep(10.0)

    start = trio.current_time()
    await fetch_ahead(fetch, range(6), use, ahead=2)
    assert results == list(range(6))
    assert trio.current_time() - start < 6 * 10 + 11  # one after another it would be 120 s
    assert [round(moment - start) for moment in starts] == [0, 0, 0, 20, 30, 40]  # never more than two ahead


@pytest.mark.parametrize("place", ["fetch", "use"])
@simulated
async def test_the_first_failure_ends_fetching_and_use_and_is_raised_by_itself(place: str):
    results: list[int] = []

    async def fetch(item: int) -> int:
        await trio.sleep(1.0 if item < 3 else 100.0)
        if place == "fetch" and item == 2:
            raise StoreError("gone")
        return item

    async def use(item: int, result: int) -> None:
        if place == "use" and item == 2:
            raise ProtocolError("false", "here")
        results.append(item)

    with pytest.raises((StoreError, ProtocolError)):
        await fetch_ahead(fetch, range(5), use, ahead=8)
    assert results in ([0, 1], [])
    assert trio.current_time() < 50


@simulated
async def test_the_first_item_that_succeeds_ends_the_search():
    attempts: list[int] = []

    async def read(item: int) -> int:
        attempts.append(item)
        if item < 2:
            raise StoreError(f"no answer from {item}")
        return item * 10

    assert await first_success(read, range(5)) == 20
    assert attempts == [0, 1, 2]


@simulated
async def test_if_no_item_succeeds_the_first_failure_is_raised():
    async def read(item: int) -> int:
        raise StoreError(f"no answer from {item}")

    with pytest.raises(StoreError, match="no answer from 0"):
        await first_success(read, range(3))
