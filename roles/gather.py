"""Run a task for many items: for all at once, ahead of their use, or one by one until it succeeds; or one in time.

Where it fails, the first failure is raised by itself, as from any tasks that run together (`first_failure`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar, TypeVarTuple

import trio

from protocol.errors import ProtocolError
from roles.ports import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

STORAGE_ERRORS: Final = (StoreError, ProtocolError)
"""What reading from storage raises: no answer, or an answer that must not be used."""


class FailFastTasks:
    """Tasks of one `first_failure` block."""

    def __init__(self, nursery: trio.Nursery, errors: tuple[type[Exception], ...], cancel_others: bool) -> None:
        self.cancel_scope = nursery.cancel_scope  # covers the block and all of its tasks
        self.failure: Exception | None = None  # the first expected error; None as long as there is none
        self._nursery = nursery
        self._errors = errors
        self._cancel_others = cancel_others

    def start_soon(self, task: Callable[[*Arguments], Awaitable[object]], *arguments: *Arguments) -> None:
        """Start a task beside the others."""
        self._nursery.start_soon(self._run, lambda: task(*arguments))

    def record(self, error: Exception) -> None:
        """Remember the first failure, and cancel the tasks that still run unless they may end by themselves."""
        self.failure = self.failure or error
        if self._cancel_others:
            self.cancel_scope.cancel()

    async def _run(self, task: Callable[[], Awaitable[object]]) -> None:
        try:
            await task()
        except self._errors as error:
            self.record(error)


@asynccontextmanager
async def first_failure(*errors: type[Exception], cancel_others: bool = True) -> AsyncIterator[FailFastTasks]:
    """Open a nursery whose tasks may fail with expected errors: the block raises the first of these, by itself. Any
    other error leaves the block as it leaves a nursery, which raises a group of exceptions that no `except StoreError`
    catches.

    A failure cancels the other tasks, or else they end by themselves before the block raises; a task that begins new
    work looks at `failure` first.
    """
    async with trio.open_nursery() as nursery:
        tasks = FailFastTasks(nursery, errors, cancel_others)
        try:
            yield tasks
        except errors as error:
            tasks.record(error)
    if tasks.failure is not None:
        raise tasks.failure


async def answer_of(read: Callable[[], Awaitable[Result]], seconds: float, place: str = "") -> Result:
    """Return what a reading of a place returns; raise StoreError if it has not ended after some seconds."""
    with trio.move_on_after(seconds):
        return await read()
    raise StoreError(f"{place}: no answer within {seconds:g} s" if place else f"no answer within {seconds:g} s")


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
