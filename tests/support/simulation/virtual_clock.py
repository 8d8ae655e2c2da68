"""Scenarios on trio's virtual clock, which jumps to the next event: no test waits for real time."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from trio.testing import MockClock

T = TypeVar("T")


def simulate(scenario: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Run a scenario on a virtual clock that jumps to the next event; return its result."""
    return trio.run(scenario, *arguments, clock=MockClock(autojump_threshold=0))


def simulated(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Return a test that runs a scenario on a virtual clock."""

    def test() -> None:
        simulate(scenario)

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test
