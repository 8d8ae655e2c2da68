"""Tests of roles/gather.py: order, concurrency, and what a failure ends."""

import pytest
import trio

from protocol.errors import ProtocolError
from roles.gather import fetch_ahead, gather
from roles.ports import EngineError, StoreError
from tests.roles.test_follower import simulated


@simulated
async def test_results_come_in_the_order_of_the_items_and_few_tasks_run_at_once():
    running, most = 0, 0

    async def square(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(10.0 - item)
        running -= 1
        return item * item

    assert await gather(square, range(10), at_once=3) == [item * item for item in range(10)]
    assert most == 3
    assert await gather(square, []) == []


@pytest.mark.parametrize("cancel_others", [True, False])
def test_after_a_failure_nothing_is_begun_and_others_end_or_are_cancelled(cancel_others: bool):
    begun: list[int] = []
    ended: list[int] = []

    async def task(item: int) -> None:
        begun.append(item)
        if item == 1:
            await trio.sleep(1.0)
            raise EngineError("broken")
        await trio.sleep(5.0)
        ended.append(item)

    async def scenario() -> None:
        with pytest.raises(EngineError):
            await gather(task, range(10), at_once=3, errors=(EngineError,), cancel_others=cancel_others)
        assert begun == [0, 1, 2]
        assert sorted(ended) == ([] if cancel_others else [0, 2])

    simulated(scenario)()


def test_the_next_are_fetched_while_one_is_used():
    async def scenario() -> None:
        began: list[float] = []
        used: list[int] = []

        async def fetch(item: int) -> int:
            began.append(trio.current_time())
            await trio.sleep(10.0)
            return item * item

        async def use(item: int, result: int) -> None:
            assert result == item * item
            used.append(item)
            await trio.sleep(10.0)

        start = trio.current_time()
        await fetch_ahead(fetch, range(6), use, ahead=2)
        assert used == list(range(6))
        assert trio.current_time() - start < 6 * 10 + 11  # one after another it would be 120 s
        assert [round(moment - start) for moment in began] == [0, 0, 0, 20, 30, 40]  # never more than two ahead

    simulated(scenario)()


@pytest.mark.parametrize("place", ["fetch", "use"])
def test_a_failure_stops_everything_and_comes_out_plain(place: str):
    async def scenario() -> None:
        used: list[int] = []

        async def fetch(item: int) -> int:
            await trio.sleep(1.0 if item < 3 else 100.0)
            if place == "fetch" and item == 2:
                raise StoreError("gone")
            return item

        async def use(item: int, result: int) -> None:
            if place == "use" and item == 2:
                raise ProtocolError("bent", "here")
            used.append(item)

        with pytest.raises((StoreError, ProtocolError)):
            await fetch_ahead(fetch, range(5), use, ahead=8)
        assert used in ([0, 1], [])
        assert trio.current_time() < 50

    simulated(scenario)()
