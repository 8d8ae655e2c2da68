"""Each trouble alone ends in recovery; pairs by `python -m bench.faults`."""

import pytest

from tests.support.simulation.scenarios import TROUBLES
from tests.support.simulation.sweep import outcome_in


@pytest.mark.parametrize("name", TROUBLES)
def test_a_single_trouble_violates_nothing_and_everybody_works_again(name: str):
    found = outcome_in(TROUBLES[name].weather(seed=1))
    assert found.violations == ()
    assert found.versions >= 1
    assert found.collected >= 1


def test_verdicts_are_looked_at_often_enough_though_a_wrong_clock_takes_the_time_for_it():
    bent, fast = TROUBLES["storage: one bit differs"], TROUBLES["clock: everybody's an hour fast"]
    assert outcome_in((bent + fast).weather(seed=29)).violations == ()
