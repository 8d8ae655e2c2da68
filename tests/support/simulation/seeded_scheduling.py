"""Deterministic runs: a seed decides the order in which trio runs ready tasks."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run as scheduler
from trio.testing import MockClock

_SWITCH = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextmanager
def seeded_scheduling(seed: int) -> Iterator[None]:
    """Make every `trio.run` in the block order its tasks by a seed.

    Trio shuffles ready tasks on purpose, and has no public way to seed that. This sets the switch and the generator
    that its plug-in for Hypothesis sets. With the switch, ready tasks are sorted by age before they are shuffled.
    """
    previous_switch = getattr(scheduler, _SWITCH)
    state = scheduler._r.getstate()
    setattr(scheduler, _SWITCH, True)
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        setattr(scheduler, _SWITCH, previous_switch)
        scheduler._r.setstate(state)


def run_seeded(seed: int, scenario: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Run a scenario in virtual time, in the order of a seed, and return its result."""
    with seeded_scheduling(seed):
        return trio.run(scenario, *arguments, clock=MockClock(autojump_threshold=0))
