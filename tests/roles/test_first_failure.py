"""Tests of roles/first_failure.py: the first expected error comes out by itself, whatever else runs or fails."""

import pytest
import trio

from roles.first_failure import first_failure
from roles.ports import EngineError, StoreError
from tests.support.simulation.virtual_clock import simulated


async def fail_after(seconds: float, error: Exception) -> None:
    await trio.sleep(seconds)
    raise error


@simulated
async def test_the_first_of_several_failures_is_raised_by_itself():
    with pytest.raises(StoreError, match="first"):
        async with first_failure(StoreError) as tasks:
            for _ in range(3):
                tasks.start_soon(fail_after, 1.0, StoreError("first"))
            tasks.start_soon(fail_after, 2.0, StoreError("second"))


@simulated
async def test_a_failure_cancels_the_other_tasks_and_the_block():
    with pytest.raises(StoreError):
        async with first_failure(StoreError) as tasks:
            tasks.start_soon(trio.sleep, 1000.0)
            tasks.start_soon(fail_after, 1.0, StoreError("gone"))
            await trio.sleep(1000.0)
    assert trio.current_time() == 1.0


@simulated
async def test_a_failure_of_the_block_itself_cancels_the_tasks():
    with pytest.raises(StoreError, match="block"):
        async with first_failure(StoreError) as tasks:
            tasks.start_soon(trio.sleep, 1000.0)
            await fail_after(1.0, StoreError("block"))
    assert trio.current_time() == 1.0


@simulated
async def test_an_unexpected_error_leaves_the_block_as_it_leaves_a_nursery():
    with pytest.raises(ExceptionGroup) as error_info:
        async with first_failure(StoreError) as tasks:
            tasks.start_soon(fail_after, 1.0, EngineError("broken"))
    assert error_info.group_contains(EngineError, match="broken")


@simulated
async def test_tasks_that_are_not_cancelled_end_before_the_failure_is_raised():
    with pytest.raises(StoreError, match="first"):
        async with first_failure(StoreError, cancel_others=False) as tasks:
            tasks.start_soon(fail_after, 1.0, StoreError("first"))
            tasks.start_soon(fail_after, 5.0, StoreError("second"))
            tasks.start_soon(trio.sleep, 10.0)
    assert trio.current_time() == 10.0


@simulated
async def test_the_scope_can_end_the_block_without_a_failure():
    async with first_failure(StoreError) as tasks:
        tasks.cancel_scope.deadline = trio.current_time() + 3.0
        tasks.start_soon(trio.sleep, 1000.0)
    assert trio.current_time() == 3.0


@simulated
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
