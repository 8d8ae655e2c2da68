"""A site or the coordinator is killed at each kind of operation; `-m slow` kills it at every single one."""

import re
from functools import partial

import pytest

from tests.outer.crash_matrix import run
from tests.support.simulation.virtual_clock import simulate

VICTIMS = ("site-0", "coordinator")


def operations(victim: str) -> list[tuple[str, str]]:
    """Return the operations of a run without a crash."""
    return simulate(partial(run, victim, 1 << 30, after=False))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_any_kind_of_operation_loses_no_update(victim: str) -> None:
    seen = operations(victim)
    kinds = {  # the last place of each kind that is not in the last rounds
        (operation, re.sub(r"[0-9a-f]{16,}|\d+", "#", path)): place
        for place, (operation, path) in enumerate(seen[: len(seen) * 2 // 3])
    }
    for count, place in enumerate(kinds.values()):
        simulate(partial(run, victim, place, after=count % 2 == 1))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_is_killed_at_every_operation_loses_no_update(victim: str, after: bool) -> None:
    for place in range(len(operations(victim))):
        simulate(partial(run, victim, place, after=after))
