"""What nodes build on: concurrent calls, the first failure among tasks, reports of changes, pauses between tries."""

import pytest
import trio

from protocol.errors import ProtocolError
from roles.gather import ByteLimit, fetch_ahead, first_failure, first_success, gather
from roles.node.participant_memory import Backoff
from roles.node.retries import ChangeReporter
from roles.ports import EngineError, StoreError
from tests.support.simulation.network import Log


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


async def test_data_has_room_up_to_a_limit_or_a_single_larger_piece():
    limit, active, most = ByteLimit(10), list[int](), list[int]()

    async def hold(size: int) -> None:
        async with limit.room(size):
            active.append(size)
            most.append(sum(active))
            await trio.sleep(1.0)
            active.remove(size)

    sizes = [4, 6, 1, 20, 3, 10]
    await gather(hold, sizes, at_once=len(sizes))
    assert max(size for size in most if size != 20) <= 10 and sorted(most)[-1] == 20
    with trio.move_on_after(0.5):  # one that is cancelled gives up its room
        await hold(10)
    await hold(10)


@pytest.mark.parametrize("cancel_others", [True, False])
async def test_after_a_failure_nothing_is_begun_and_others_end_or_are_cancelled(cancel_others: bool):
    starts: list[int] = []
    ends: list[int] = []

    async def task(item: int) -> None:
        starts.append(item)
        if item == 1:
            await trio.sleep(1.0)
            raise EngineError("broken")
        await trio.sleep(5.0)
        ends.append(item)

    with pytest.raises(EngineError):
        await gather(task, range(10), at_once=3, errors=(EngineError,), cancel_others=cancel_others)
    assert starts == [0, 1, 2]
    assert sorted(ends) == ([] if cancel_others else [0, 2])


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


@pytest.mark.parametrize("count", [2, 5])
async def test_the_first_item_that_succeeds_ends_the_search_or_the_first_failure_is_raised(count: int):
    attempts: list[int] = []

    async def read(item: int) -> int:
        attempts.append(item)
        if item < 2:
            raise StoreError(f"no answer from {item}")
        return item * 10

    if count > 2:
        assert await first_success(read, range(count)) == 20
    else:
        with pytest.raises(StoreError, match="no answer from 0"):
            await first_success(read, range(count))
    assert attempts == [0, 1, 2][:count]


# Tests of first_failure of roles/gather.py: the first expected error comes out by itself, whatever else runs or fails


async def fail_after(seconds: float, error: Exception) -> None:
    await trio.sleep(seconds)
    raise error


@pytest.mark.parametrize(("cancel_others", "end"), [(True, 1.0), (False, 10.0)])
async def test_the_first_of_several_failures_is_raised_by_itself_when_the_others_end(cancel_others: bool, end: float):
    with pytest.raises(StoreError, match="first"):
        async with first_failure(StoreError, cancel_others=cancel_others) as tasks:
            for _ in range(3):
                tasks.start_soon(fail_after, 1.0, StoreError("first"))
            tasks.start_soon(fail_after, 5.0, StoreError("second"))
            tasks.start_soon(trio.sleep, 10.0)
    assert trio.current_time() == end


@pytest.mark.parametrize("place", ["task", "block"])
async def test_a_failure_of_a_task_or_the_block_cancels_the_rest(place: str):
    with pytest.raises(StoreError, match="gone"):
        async with first_failure(StoreError) as tasks:
            tasks.start_soon(trio.sleep, 1000.0)
            if place == "task":
                tasks.start_soon(fail_after, 1.0, StoreError("gone"))
                await trio.sleep(1000.0)
            await fail_after(1.0, StoreError("gone"))
    assert trio.current_time() == 1.0


async def test_an_unexpected_error_leaves_the_block_as_it_leaves_a_nursery():
    with pytest.raises(ExceptionGroup) as error_info:
        async with first_failure(StoreError) as tasks:
            tasks.start_soon(fail_after, 1.0, EngineError("broken"))
    assert error_info.group_contains(EngineError, match="broken")


async def test_the_scope_can_end_the_block_without_a_failure():
    async with first_failure(StoreError) as tasks:
        tasks.cancel_scope.deadline = trio.current_time() + 3.0
        tasks.start_soon(trio.sleep, 1000.0)
    assert trio.current_time() == 3.0


async def test_a_failure_is_raised_even_if_the_deadline_passes_while_other_tasks_end():
    async def end_slowly() -> None:
        try:
            await trio.sleep(1000.0)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10.0)

    with pytest.raises(StoreError):
        async with first_failure(StoreError) as tasks:
            tasks.cancel_scope.deadline = trio.current_time() + 3.0
            tasks.start_soon(end_slowly)
            tasks.start_soon(fail_after, 1.0, StoreError("gone"))


# Tests of roles/node/retries.py


@pytest.mark.parametrize(
    ("maximum", "reports"), [({}, ["away", "full", "away"]), ({"max_reports": 2}, ["away", "full"])]
)
def test_an_error_is_reported_when_its_text_changes_up_to_a_maximum(maximum: dict[str, int], reports: list[str]):
    log = Log("node")
    reporter = ChangeReporter(log, "read-failed", **maximum, path="a/b")
    for text in ("away", "away", "full", "away", "away"):
        reporter.failure(StoreError(text))
    assert log.named("read-failed") == [{"error": text, "path": "a/b"} for text in reports]


# Pauses between tries, and participants that are passed over for a while


KEY, OTHER = bytes(32), bytes([1]) * 32


def test_a_key_that_is_refused_again_is_passed_over_for_twice_as_long() -> None:
    backoff = Backoff()
    backoff.add_refusal(KEY, now=100.0)
    assert backoff.is_backing_off(KEY, 109.0)
    assert not backoff.is_backing_off(KEY, 110.0)
    assert not backoff.is_backing_off(OTHER, 109.0)
    backoff.add_refusal(KEY, now=110.0)
    assert backoff.is_backing_off(KEY, 129.0)
    assert not backoff.is_backing_off(KEY, 130.0)
    backoff.forget(KEY)
    assert not backoff.is_backing_off(KEY, 129.0)
    backoff.add_refusal(KEY, now=10_000.0)
    assert not backoff.is_backing_off(KEY, 1_000.0)  # the clock was set back
