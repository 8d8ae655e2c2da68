"""Several fetches at once, and fetches ahead of their use, with one plain error where one fails."""

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


async def fetch_ahead(
    fetch: Callable[[Item], Awaitable[Result]],
    items: Sequence[Item],
    use: Callable[[Item, Result], Awaitable[None]],
    *,
    ahead: int,
) -> None:
    """Use what a fetch gives for each item, in order and one at a time, while the next `ahead` items are being fetched.

    Raises:
        StoreError, ProtocolError: the first that a fetch or a use raised; what was under way is cancelled.
    """
    results: dict[int, Result] = {}
    arrived = [trio.Event() for _ in items]
    failures: list[Exception] = []
    room = trio.Semaphore(ahead + 1)

    async def fetch_one(index: int, scope: trio.CancelScope) -> None:
        try:
            results[index] = await fetch(items[index])
        except (StoreError, ProtocolError) as error:
            failures.append(error)
            scope.cancel()
        arrived[index].set()

    async def use_all(scope: trio.CancelScope) -> None:
        for index, item in enumerate(items):
            await arrived[index].wait()
            if failures:
                return
            try:
                await use(item, results.pop(index))
            except (StoreError, ProtocolError) as error:
                failures.append(error)
                scope.cancel()
            room.release()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(use_all, nursery.cancel_scope)
        for index in range(len(items)):
            await room.acquire()
            nursery.start_soon(fetch_one, index, nursery.cancel_scope)
    if failures:
        raise failures[0]
