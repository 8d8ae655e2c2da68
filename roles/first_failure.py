"""Tasks that run together and end together at the first failure, with that one plain error instead of a group."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVarTuple

import trio

Arguments = TypeVarTuple("Arguments")


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
