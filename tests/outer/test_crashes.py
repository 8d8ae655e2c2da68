"""A site or the coordinator is killed at each kind of operation; `-m slow` kills it before every third operation, and
after every third one behind it."""

import re
from functools import partial

import pytest

from tests.support.simulation.outer_crashes import run
from tests.support.simulation.virtual_clock import simulate

VICTIMS = ("site-0", "coordinator")


def operations(victim: str) -> list[tuple[str, str]]:
    """Return the operations of a run without a crash."""
    return simulate(partial(run, victim, 1 << 30, after=False))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_any_kind_of_operation_loses_no_update(victim: str) -> None:
    places = operations(victim)
    kinds = {  # the last place of each kind that is not in the last rounds
        (operation, re.sub(r"[0-9a-f]{16,}|\d+", "#", path)): place
        for place, (operation, path) in enumerate(places[: len(places) * 2 // 3])
    }
    for count, place in enumerate(kinds.values()):
        simulate(partial(run, victim, place, after=count % 2 == 1))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "after"), [(0, False), (1, True)], ids=["before", "after"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_every_third_operation_loses_no_update(
    victim: str, first: int, after: bool
) -> None:
    for place in range(first, len(operations(victim)), 3):
        simulate(partial(run, victim, place, after=after))
