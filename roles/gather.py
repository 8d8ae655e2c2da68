"""Run a task for many items: for all at once, ahead of their use, or one by one until it succeeds; or one in time.

Where it fails, the first failure is raised by itself.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import trio

from protocol.errors import ProtocolError
from roles.first_failure import first_failure
from roles.ports import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")

STORAGE_ERRORS: Final = (StoreError, ProtocolError)
"""What reading from storage raises: no answer, or an answer that must not be used."""


async def answer_of(read: Callable[[], Awaitable[Result]], seconds: float) -> Result:
    """Return what a reading returns; raise StoreError if it has not ended after some seconds."""
    with trio.move_on_after(seconds):
        return await read()
    raise StoreError(f"no answer in {seconds:g} s")


async def first_success(task: Callable[[Item], Awaitable[Result]], items: Sequence[Item]) -> Result:
    """Run a task for one item after the other (at least one) until it succeeds, and return that result. Raise the first
    failure if it fails for every item.
    """
    failures: list[Exception] = []
    for item in items:
        try:
            return await task(item)
        except STORAGE_ERRORS as error:
            failures.append(error)
    raise failures[0]


async def gather(
    task: Callable[[Item], Awaitable[Result]],
    items: Sequence[Item],
    at_once: int = 8,
    *,
    errors: tuple[type[Exception], ...] = STORAGE_ERRORS,
    cancel_others: bool = True,
) -> list[Result]:
    """Run a task for every item, at most `at_once` at a time, and return the results in the order of the items.

    Items are begun in order; after a failure no other is begun.

    Args:
        errors: the expected errors of a task.
        cancel_others: whether a failure cancels the tasks under way; if not, they are waited for.
    """
    results: dict[int, Result] = {}
    queue = iter(enumerate(items))
    async with first_failure(*errors, cancel_others=cancel_others) as tasks:

        async def work() -> None:
            for index, item in queue:
                if tasks.failure is not None:
                    return
                results[index] = await task(item)

        for _ in range(min(at_once, len(items))):
            tasks.start_soon(work)
    return [results[index] for index in range(len(items))]


class ByteLimit:
    """Lets tasks have data in memory, in the order in which they ask: up to `most` bytes together, or a single larger
    piece.
    """

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._turn, self._freed = trio.Lock(), trio.Event()

    @asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Wait until so many bytes have room, and give them up at the end of the block."""
        async with self._turn:
            while self._used and self._used + size > self._most:
                await self._freed.wait()
            self._used += size
        try:
            yield
        finally:
            self._used -= size
            self._freed.set()
            self._freed = trio.Event()


async def fetch_ahead(
    fetch: Callable[[Item], Awaitable[Result]],
    items: Sequence[Item],
    use: Callable[[Item, Result], Awaitable[None]],
    *,
    ahead: int,
    sizes: Sequence[int] = (),
    ahead_bytes: int = 0,
) -> None:
    """Use the result of a fetch for each item, in order and one at a time, while the next `ahead` items are fetched. If
    the results have sizes, no more than `ahead_bytes`, or a single larger one, are fetched ahead, or wait.
    """
    results: dict[int, Result] = {}
    fetches = [trio.Event() for _ in items]  # set when the result of an item is there
    sizes = sizes or [0] * len(items)
    used, was_used = 0, trio.Event()  # how many items were used, and when the next one was

    async def fetch_one(index: int) -> None:
        results[index] = await fetch(items[index])
        fetches[index].set()

    async def use_all() -> None:
        nonlocal used, was_used
        for index, item in enumerate(items):
            await fetches[index].wait()
            await trio.lowlevel.checkpoint_if_cancelled()  # by the failure of a later fetch
            await use(item, results.pop(index))
            used += 1
            was_used.set()
            was_used = trio.Event()

    async with first_failure(*STORAGE_ERRORS) as tasks:
        tasks.start_soon(use_all)
        for index in range(len(items)):
            # the item in use does not count
            while index > used + ahead or (index > used + 1 and sum(sizes[used + 1 : index + 1]) > ahead_bytes > 0):
                await was_used.wait()
            tasks.start_soon(fetch_one, index)
