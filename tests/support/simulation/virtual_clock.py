"""Scenarios on trio's virtual clock, which jumps to the next event, so that no test waits for real time."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import trio
from trio.testing import MockClock

P = ParamSpec("P")
T = TypeVar("T")


def simulate(scenario: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Run a scenario on a virtual clock that jumps to the next event; return its result."""
    return trio.run(scenario, *arguments, clock=MockClock(autojump_threshold=0))


def simulated(scenario: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Return a test that runs a scenario on a virtual clock; its parameters and fixtures are those of the scenario."""

    @wraps(scenario)
    def test(*arguments: P.args, **fixtures: P.kwargs) -> T:
        return simulate(lambda: scenario(*arguments, **fixtures))

    return test


@asynccontextmanager
async def running(task: Callable[..., Awaitable[object]], *arguments: object) -> AsyncIterator[trio.Nursery]:
    """Run a task until the end of the block, in which others may be started beside it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task, *arguments)
        yield nursery
        nursery.cancel_scope.cancel()
