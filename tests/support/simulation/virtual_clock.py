"""Scenarios on trio's virtual clock, which jumps to the next event, so that no test waits for real time; that clock as
wall-clock time; and deterministic runs, in which a seed decides the order of ready tasks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from random import Random
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import trio
from trio._core import _run as scheduler
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


class TrioClock:
    """Implements the Clock port on trio's clock, shifted so that it begins at a given moment.

    With trio's MockClock, ten simulated hours take ten milliseconds.

    Args:
        begin: seconds since the Unix epoch.
    """

    def __init__(self, begin: float) -> None:
        self._shift = begin - trio.current_time()

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""
        return trio.current_time() + self._shift

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch)."""
        await trio.sleep_until(moment - self._shift)


def run_seeded(seed: int, scenario: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Run a scenario in virtual time, in the order and with the nonces of a seed, and return its result.

    Trio shuffles ready tasks on purpose, and has no public way to seed that. This sets the switch and the generator
    that its plug-in for Hypothesis sets. With the switch, ready tasks are sorted by age before they are shuffled.
    """
    with (
        patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        patch.object(scheduler, "_r", Random(seed)),
        patch("secrets.randbits", Random(seed).getrandbits),
    ):
        return simulate(scenario, *arguments)
