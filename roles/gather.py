"""Several fetches at once, with one plain error where one fails."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from protocol.errors import ProtocolError
from roles.ports import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")


async def gather(task: Callable[[Item], Awaitable[Result]], items: Sequence[Item], at_once: int = 8) -> list[Result]:
    """Run a task for every item, at most `at_once` at a time; results in the order of the items.

    Raises:
        StoreError, ProtocolError: the first that a task raised; the others are cancelled.
    """
    results: dict[int, Result] = {}
    failures: list[Exception] = []
    limiter = trio.CapacityLimiter(at_once)

    async def run(index: int, item: Item, scope: trio.CancelScope) -> None:
        async with limiter:
            try:
                results[index] = await task(item)
            except (StoreError, ProtocolError) as error:
                failures.append(error)
                scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, item in enumerate(items):
            nursery.start_soon(run, index, item, nursery.cancel_scope)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(items))]
