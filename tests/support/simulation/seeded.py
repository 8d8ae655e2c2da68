"""One seed, one trace: trio runs what is ready in an order that the seed decides, on a clock that jumps."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run as scheduler
from trio.testing import MockClock

_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextmanager
def seeded_scheduling(seed: int) -> Iterator[None]:
    """Every `trio.run` inside orders its tasks as the seed says; afterwards trio is as it was.

    Trio shuffles what is ready on purpose, and has no public way to seed that: these are the switch and the generator
    that its own plug-in for Hypothesis uses. With the switch on, what is ready is sorted by age before it is shuffled.

    Raises:
        AttributeError: this trio has them no more.
    """
    before = getattr(scheduler, _SWITCH)
    state = scheduler._r.getstate()
    setattr(scheduler, _SWITCH, True)
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        setattr(scheduler, _SWITCH, before)
        scheduler._r.setstate(state)


def run_seeded(seed: int, scenario: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """What a scenario returns, on virtual time and in the order that a seed decides."""
    with seeded_scheduling(seed):
        return trio.run(scenario, *arguments, clock=MockClock(autojump_threshold=0))
