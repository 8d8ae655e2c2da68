"""A network recovers from each fault alone; `python -m bench.faults` runs pairs of them."""

import pytest

from tests.support.simulation.scenarios import SCENARIOS
from tests.support.simulation.sweep import run_schedule


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_network_recovers_from_a_single_fault(name: str):
    outcome = run_schedule(SCENARIOS[name].schedule(seed=1))
    assert outcome.violations == ()
    assert outcome.versions >= 1
    assert outcome.window_count >= 1


def test_verdicts_are_read_often_enough_although_a_wrong_clock_leaves_little_time():
    flipped_bit, fast_clock = SCENARIOS["storage: one bit differs"], SCENARIOS["clock: everybody's an hour fast"]
    assert run_schedule((flipped_bit + fast_clock).schedule(seed=29)).violations == ()
