"""A network recovers from each fault alone; `python -m bench.faults` runs pairs of them."""

import pytest

from tests.support.simulation.scenarios import TROUBLES
from tests.support.simulation.sweep import outcome_in


@pytest.mark.parametrize("name", TROUBLES)
def test_a_network_recovers_from_a_single_fault(name: str):
    outcome = outcome_in(TROUBLES[name].weather(seed=1))
    assert outcome.violations == ()
    assert outcome.versions >= 1
    assert outcome.collected >= 1


def test_verdicts_are_read_often_enough_although_a_wrong_clock_leaves_little_time():
    flipped_bit, fast_clock = TROUBLES["storage: one bit differs"], TROUBLES["clock: everybody's an hour fast"]
    assert outcome_in((flipped_bit + fast_clock).weather(seed=29)).violations == ()
